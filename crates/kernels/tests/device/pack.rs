//! Codes have the bits of the CPU on every device.

use lockstep_kernels::reference::quantize as reference;
use lockstep_kernels::{Code, cpu};

use crate::check::*;

const CODES: [Code; 3] = [Code::Bf16, Code::F16, Code::Int8];

/// Elements that share a scale.
const CHUNK: usize = 256;

/// Packed bytes and the new residual, on the CPU.
fn on_cpu(code: Code, x: &[f32], residual: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (mut residual, mut packed) = (residual.to_vec(), vec![0; code.bytes(x.len())]);
    cpu::quantize::quantize(&cpu::Cpu::new(1), code, x, &mut residual, &mut packed);
    (packed, residual)
}

/// Packed bytes and the new residual, on the device under test. Packed bytes start at any address, too.
fn on_device(code: Code, x: &[f32], residual: &[f32], offset: usize) -> (Vec<u8>, Vec<f32>) {
    let (x, mut residual) = (Data::row(offset, x), Data::row(offset, residual));
    let bytes = code.bytes(x.view().len());
    let mut packed = Data::row(offset, &vec![0u8; bytes]);
    device().pack(code, x.view(), residual.view_mut(), packed.view_mut());
    (packed.read(), residual.read())
}

#[test]
fn matches_the_reference() {
    for (n, code) in LENGTHS.into_iter().flat_map(|n| CODES.map(|code| (n, code))) {
        let (x, residual) = (numbers::<f32>(n, 1), numbers::<f32>(n, 2));
        let sum: Vec<f32> = x.iter().zip(&residual).map(|(x, residual)| x + residual).collect();
        let received = reference::round_trip(code, &to_f64(&sum));
        let lost = to_f64(&sum).iter().zip(&received).map(|(sum, sent)| sum - sent).collect();
        let added = to_f64(&x).iter().zip(&received).map(|(x, sent)| x + sent).collect();
        for offset in [0, 1, 2, 4] {
            let (expected, cpu_residual) = on_cpu(code, &x, &residual);
            let all: [Vec<f64>; 3] = [received.clone(), Vec::clone(&lost), Vec::clone(&added)];
            check(&format!("{code:?} of {n} from {offset}"), 1e-6, all, || {
                let (packed, residual) = on_device(code, &x, &residual, offset);
                assert!(packed == expected, "{code:?} of {n}: codes differ from those of the CPU");
                assert_eq!(residual, cpu_residual);
                let packed = Data::row(offset, &packed);
                let mut out = Data::row(offset, &vec![f32::NAN; n]);
                let mut added = Data::row(offset, &x);
                device().unpack(code, packed.view(), out.view_mut());
                device().add_unpacked(code, packed.view(), added.view_mut());
                [out.read_f64::<f32>(), to_f64(&residual), added.read_f64::<f32>()]
            });
        }
    }
}

/// From subnormal numbers to the largest.
#[test]
fn codes_of_all_magnitudes_match_the_cpu() {
    for power in (-149..=127).step_by(3) {
        let size = 2f64.powi(power);
        let x: Vec<f32> =
            numbers::<f32>(1000, 3).iter().map(|x| (*x as f64 / 8.0 * size) as f32).collect();
        for code in CODES {
            let zeros = vec![0.0; x.len()];
            assert_eq!(
                on_device(code, &x, &zeros, 0),
                on_cpu(code, &x, &zeros),
                "{code:?} at 2^{power}"
            );
        }
    }
}

#[test]
fn nan_and_infinity_are_sent_and_leave_no_residual() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (code, at) in CODES.into_iter().flat_map(|code| [0, 300, 599].map(|at| (code, at))) {
            let mut x = numbers::<f32>(600, 4);
            x[at] = bad;
            let (packed, residual) = on_device(code, &x, &[0.0; 600], 0);
            assert!(residual.iter().all(|x| x.is_finite()), "{code:?} leaves a residual of {bad}");
            let mut out = Data::row(0, &[0f32; 600]);
            device().unpack(code, Data::row(0, &packed).view(), out.view_mut());
            let out = out.read::<f32>();
            let not_finite: Vec<usize> = (0..600).filter(|i| !out[*i].is_finite()).collect();
            let chunk = at / CHUNK * CHUNK..(at / CHUNK * CHUNK + CHUNK).min(600);
            match code {
                Code::Bf16 => assert_eq!(not_finite, [at]),
                _ => assert_eq!(not_finite, chunk.collect::<Vec<_>>(), "{code:?}"),
            }
        }
    }
}
