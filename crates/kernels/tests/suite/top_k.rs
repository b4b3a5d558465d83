use crate::check::*;
use lockstep_kernels::cpu::top_k::{PAIR_BYTES, take_top_k, take_top_k_normalized, update_squares};
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::reference::top_k as reference;

/// Takes the `k` largest of `x` at every level and compares them with a sort.
fn check(what: &str, x: &[f32], k: usize) {
    let expected = reference::indices(&to_f64(x), k);
    for level in Level::of_this_machine().and_below() {
        for threads in [1, 3] {
            let (mut rest, mut pairs) = (x.to_vec(), vec![0; k * PAIR_BYTES]);
            take_top_k(&Cpu::at(level, threads), &mut rest, &mut pairs);
            let at = format!("{k} of {} {what}, {level:?}, {threads} threads", x.len());
            let word = |pair: &[u8]| u32::from_le_bytes(pair.try_into().unwrap());
            let places: Vec<usize> =
                pairs.chunks(PAIR_BYTES).map(|p| word(&p[..4]) as usize).collect();
            assert_eq!(places, expected, "{at}");
            for pair in pairs.chunks(PAIR_BYTES) {
                let place = word(&pair[..4]) as usize;
                assert_eq!(word(&pair[4..]), x[place].to_bits(), "{at}");
                rest[place] = if rest[place] == 0.0 { x[place] } else { f32::MAX };
            }
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&rest), bits(x), "{at}: elements that were not taken changed");
        }
    }
}

#[test]
fn matches_the_reference() {
    for n in LENGTHS {
        for k in [0, 1, 2, n / 100, n / 3, n.saturating_sub(1), n] {
            let k = k.min(n);
            check("normal", &numbers::<f32>(n, 5), k);
            // Few distinct values, so that there are many ties, of both signs.
            let coarse: Vec<f32> = integers(n, 7, 6).iter().map(|x| *x as f32 - 3.0).collect();
            check("coarse", &coarse, k);
            check("zeros", &vec![0.0; n], k);
            // Equal except for the last digit.
            let near: Vec<f32> =
                integers(n, 5, 7).iter().map(|x| f32::from_bits(1f32.to_bits() + x)).collect();
            check("near", &near, k);
        }
    }
}

#[test]
fn nan_and_infinity_are_taken_first() {
    let mut x = numbers::<f32>(5000, 8);
    (x[4000], x[17], x[30]) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
    for k in [1, 2, 3, 50] {
        check("with NaN and infinities", &x, k);
    }
}

/// Elements are ranked by their size relative to the root mean square of what was taken from the same place before.
#[test]
fn elements_large_for_their_place_are_taken() {
    const N: usize = 5000;
    let step = |i: u64| numbers::<f32>(N, 20 + i);
    let scale = |i: usize| 10f32.powi(i as i32 % 5 - 4);
    for level in Level::of_this_machine().and_below() {
        for threads in [1, 3] {
            let cpu = Cpu::at(level, threads);
            let (mut residual, mut squares) = (vec![0f32; N], vec![0f32; N]);
            let (mut ratios, mut pairs) = (vec![f32::NAN; N], vec![0; 50 * PAIR_BYTES]);
            let all: Vec<f32> = (0..N).map(|i| step(0)[i] * scale(i)).collect();
            update_squares(&cpu, &all, &mut squares);
            let mut taken = [0; 5];
            for i in 1..4 {
                residual
                    .iter_mut()
                    .zip(step(i))
                    .enumerate()
                    .for_each(|(i, (k, x))| *k += x * scale(i));
                let means: Vec<f32> =
                    squares.iter().map(|square| (square * 0.95).max(1e-30)).collect();
                let sizes = residual.iter().zip(&means).map(|(k, mean)| k / (mean.sqrt() + 1e-8));
                let places = reference::indices(&to_f64(&sizes.collect::<Vec<f32>>()), 50);
                let before = residual.clone();
                take_top_k_normalized(&cpu, &mut residual, &mut squares, &mut ratios, &mut pairs);
                for (pair, place) in pairs.chunks(PAIR_BYTES).zip(places) {
                    let number = f32::from_le_bytes(pair[4..].try_into().unwrap());
                    assert_eq!(u32::from_le_bytes(pair[..4].try_into().unwrap()), place as u32);
                    assert_eq!((number, residual[place]), (before[place], 0.0), "{level:?}");
                    let mean = means[place] + number * number * (1.0 - 0.95f32);
                    assert!((squares[place] - mean).abs() <= 1e-6 * mean, "{level:?}");
                    taken[place % 5] += 1;
                }
            }
            // Places with small numbers are taken as often as places with large numbers.
            assert!(taken.iter().all(|count| (15..=45).contains(count)), "{taken:?}");
        }
    }
}
