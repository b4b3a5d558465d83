use crate::check::*;
use lockstep_kernels::cpu::{Cpu, dropout};
use lockstep_kernels::reference::dropout as reference;
use lockstep_kernels::{DropoutMask, Float, RandomKey};

const KEY: RandomKey = RandomKey { seed: 3, stream: 9 };

crate::both_types!(matches_the_reference);

fn matches_the_reference<E: Float>() {
    for (n, p) in LENGTHS.into_iter().flat_map(|n| [0.0, 0.1, 0.9].map(|p| (n, p))) {
        let x = numbers::<E>(n, 1);
        for first in [0, 50, 1_000] {
            let mask = DropoutMask { key: KEY, p, first };
            let expected = reference::apply(&mask, &to_f64(&x));
            everywhere(&format!("{mask:?}, {n}"), tolerance::<E>(1e-6), [expected], |cpu| {
                let mut dropped = x.clone();
                dropout::apply(cpu, &mask, &mut dropped);
                [to_f64(&dropped)]
            });
        }
    }
}

#[test]
fn surviving_elements_are_scaled_to_preserve_the_mean() {
    let n = 1 << 20;
    let mut x = vec![1f32; n];
    dropout::apply(&Cpu::new(2), &DropoutMask { key: KEY, p: 0.25, first: 0 }, &mut x);
    let mean = x.iter().map(|&x| x as f64).sum::<f64>() / n as f64;
    // Five standard errors: √(p / (1 - p) / n).
    assert!((mean - 1.0).abs() < 5.0 * (1f64 / 3.0).sqrt() / 1024.0, "{mean}");
    assert!(x.iter().all(|&x| x == 0.0 || x == 4.0 / 3.0));
}
