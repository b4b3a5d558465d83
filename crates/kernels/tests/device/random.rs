//! Random numbers have the bits of the CPU on every device.

use lockstep_kernels::reference::{dropout, random as reference};
use lockstep_kernels::{Device, DropoutMask, Float, RandomKey, Tag};

use crate::check::*;

crate::both_types!(normal_numbers_match dropout_matches);

const KEY: RandomKey = RandomKey { seed: 0x1234_5678_9abc_def0, stream: 42 };

fn normal_numbers_match<E: Float>() {
    for (n, first) in
        LENGTHS.into_iter().flat_map(|n| [0, 5, 1 << 40, 1_000_003].map(|first| (n, first)))
    {
        let expected = (first..first + n as u64).map(|i| 2.0 * reference::normal(KEY, i)).collect();
        let mut cpu = vec![E::default(); n];
        on_cpu(&mut cpu, |device, x| device.normal(x, KEY, first, 2.0));
        check(&format!("{n} from {first}"), tolerance::<E>(2e-6), [expected], || {
            let mut out = Data::row((first % 2) as usize, &vec![E::default(); n]);
            device().normal(out.view_mut(), KEY, first, 2.0);
            let out = out.read::<E>();
            assert_eq!(out, cpu, "{n} from {first}: bits differ from those of the CPU");
            [to_f64(&out)]
        });
    }
}

fn dropout_matches<E: Float>() {
    for (n, p) in LENGTHS.into_iter().flat_map(|n| [0.0, 0.1, 0.9].map(|p| (n, p))) {
        let x = numbers::<E>(n, 1);
        for (first, offset) in [(0, 0), (50, 0), (1_000, 0), (1 << 40, 1), (1_003, 0)] {
            let mask = DropoutMask { key: KEY, p, first };
            let expected = dropout::apply(&mask, &to_f64(&x));
            let mut cpu = x.clone();
            on_cpu(&mut cpu, |device, x| device.dropout(x, &mask));
            check(&format!("{mask:?}, {n}"), tolerance::<E>(1e-6), [expected], || {
                let mut dropped = Data::row(offset, &x);
                device().dropout(dropped.view_mut(), &mask);
                let dropped = dropped.read::<E>();
                assert_eq!(dropped, cpu, "{mask:?}, {n}: bits differ from those of the CPU");
                [to_f64(&dropped)]
            });
        }
    }
}

/// Runs `work` on the values on the CPU.
fn on_cpu<E: Float>(values: &mut [E], work: impl FnOnce(&Device, lockstep_kernels::ViewMut<'_>)) {
    let device = Device::cpu(1);
    let mut tensor = device.empty(1, values.len(), E::DTYPE, Tag::Buffers);
    device.write(tensor.view_mut(), values);
    work(&device, tensor.view_mut());
    device.read(tensor.view(), values);
}
