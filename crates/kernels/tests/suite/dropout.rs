use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::Cpu;
use lockstep_kernels::cpu::dropout::{self, Dropout};
use lockstep_kernels::cpu::random::Key;
use lockstep_kernels::reference::dropout as reference;

const KEY: Key = Key { seed: 3, stream: 9 };

crate::both_types!(equals_its_reference);

fn equals_its_reference<E: Float>() {
    for (n, p) in LENGTHS.into_iter().flat_map(|n| [0.0, 0.1, 0.9].map(|p| (n, p))) {
        let (x, residual) = (numbers::<E>(n, 1), numbers::<E>(n, 2));
        for drop in [
            Dropout::run(KEY, p, 1_000, n),
            Dropout { key: KEY, p, first: 50, width: 7, stride: 100 },
            Dropout { key: KEY, p, first: 3, width: 300, stride: 300 },
        ] {
            let right = reference::apply(&drop, &to_f64(&x));
            let added = right.iter().zip(&residual).map(|(x, r)| x + r.as_f32() as f64).collect();
            everywhere(&format!("{drop:?} of {n}"), tolerance::<E>(1e-6), [right, added], |cpu| {
                let (mut dropped, mut added) = (x.clone(), residual.clone());
                dropout::apply(cpu, &drop, &mut dropped);
                dropout::add(cpu, &drop, &mut added, &x);
                [to_f64(&dropped), to_f64(&added)]
            });
        }
    }
}

#[test]
fn columns_of_a_rank_are_dropped_as_in_the_whole() {
    let (rows, dim, cpu) = (20, 96, Cpu::new(2));
    let mut whole = vec![1f32; rows * dim];
    dropout::apply(&cpu, &Dropout::run(KEY, 0.3, 7, rows * dim), &mut whole);
    let mut right_half = vec![1f32; rows * dim / 2];
    let drop = Dropout { key: KEY, p: 0.3, first: 7 + 48, width: 48, stride: 96 };
    dropout::apply(&cpu, &drop, &mut right_half);
    for (part, whole) in right_half.chunks_exact(48).zip(whole.chunks_exact(96)) {
        assert_eq!(part, &whole[48..]);
    }
}

#[test]
fn the_share_that_lives_is_scaled_to_keep_the_mean() {
    let n = 1 << 20;
    let mut x = vec![1f32; n];
    dropout::apply(&Cpu::new(2), &Dropout::run(KEY, 0.25, 0, n), &mut x);
    let mean = x.iter().map(|&x| x as f64).sum::<f64>() / n as f64;
    // Five standard errors: √(p / (1 - p) / n).
    assert!((mean - 1.0).abs() < 5.0 * (1f64 / 3.0).sqrt() / 1024.0, "{mean}");
    assert!(x.iter().all(|&x| x == 0.0 || x == 4.0 / 3.0));
}
