use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::RandomKey;
use lockstep_kernels::cpu::random;
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::reference::random as reference;

const KEY: RandomKey = RandomKey { seed: 0x1234_5678_9abc_def0, stream: 42 };

crate::both_types!(matches_the_reference);

fn matches_the_reference<E: Float>() {
    for (n, first) in
        LENGTHS.into_iter().flat_map(|n| [0, 5, 1 << 40, 1_000_003].map(|first| (n, first)))
    {
        let at = |one: fn(RandomKey, u64) -> f64| {
            (first..first + n as u64).map(|i| one(KEY, i)).collect::<Vec<_>>()
        };
        let expected = [at(|k, i| 2.0 * reference::normal(k, i))];
        everywhere(&format!("{n} from {first}"), tolerance::<E>(2e-6), expected, |cpu| {
            let mut normal = vec![E::default(); n];
            random::normal(cpu, KEY, first, &mut normal, 2.0);
            [to_f64(&normal)]
        });
    }
}

#[test]
fn a_slice_matches_the_whole_tensor() {
    let mut whole = vec![0f32; 5000];
    random::normal(&Cpu::new(2), KEY, 100, &mut whole, 0.02);
    for level in Level::of_this_machine().and_below() {
        for from in [0, 1, 63, 64, 255, 256, 1000] {
            let mut part = vec![0f32; 777];
            random::normal(&Cpu::at(level, 1), KEY, 100 + from as u64, &mut part, 0.02);
            assert_eq!(part, whole[from..from + 777], "{level:?}: from {from}");
        }
    }
}

#[test]
fn distributions_have_the_expected_moments() {
    let n = 1 << 20;
    let uniform: Vec<f32> = (0..n as u64).map(|i| reference::uniform(KEY, i) as f32).collect();
    let mut normal = vec![0f32; n];
    random::normal(&Cpu::new(2), KEY, 0, &mut normal, 1.0);
    let mean =
        |x: &[f32], of: fn(f64) -> f64| x.iter().map(|&x| of(x as f64)).sum::<f64>() / n as f64;
    assert!(uniform.iter().all(|x| (0.0..1.0).contains(x)));
    // Five standard errors each.
    assert!((mean(&uniform, |x| x) - 0.5).abs() < 5.0 * 0.289 / 1024.0);
    assert!(mean(&normal, |x| x).abs() < 5.0 / 1024.0);
    assert!((mean(&normal, |x| x * x) - 1.0).abs() < 5.0 * 2f64.sqrt() / 1024.0);
    assert!((mean(&normal, |x| x.powi(4)) - 3.0).abs() < 5.0 * 96f64.sqrt() / 1024.0);
    assert!((mean(&normal, |x| (x.abs() > 1.96) as u8 as f64) - 0.05).abs() < 5.0 * 0.218 / 1024.0);
    // Neighbors, Box-Muller pairs and streams are uncorrelated.
    let mut other = vec![0f32; n];
    random::normal(&Cpu::new(2), RandomKey { stream: 43, ..KEY }, 0, &mut other, 1.0);
    for (what, shift, other) in [("next", 1, &normal), ("pair", 64, &normal), ("stream", 0, &other)]
    {
        let together: f64 = normal.iter().zip(&other[shift..]).map(|(a, b)| (a * b) as f64).sum();
        assert!((together / n as f64).abs() < 5.0 / 1024.0, "{what}: {together}");
    }
}
