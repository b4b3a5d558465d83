//! The selection of top-k elements is that of the CPU on every device, to the bit.

use lockstep_kernels::cpu::top_k::{self, PAIR_BYTES};
use lockstep_kernels::cpu::{Cpu, elementwise};
use lockstep_kernels::reference::top_k as reference;

use crate::check::*;

/// Residual, squares and pairs after one step.
type Step = (Vec<f32>, Vec<f32>, Vec<u8>);

fn on_cpu(x: &[f32], residual: &[f32], squares: &[f32], k: usize) -> Step {
    let cpu = Cpu::new(1);
    let (mut residual, mut squares) = (residual.to_vec(), squares.to_vec());
    let (mut ratios, mut pairs) = (vec![0f32; x.len()], vec![0u8; k * PAIR_BYTES]);
    elementwise::add(&cpu, &mut residual, x);
    top_k::take_top_k_normalized(&cpu, &mut residual, &mut squares, &mut ratios, &mut pairs);
    (residual, squares, pairs)
}

fn on_device(x: &[f32], residual: &[f32], squares: &[f32], k: usize) -> Step {
    let (mut residual, mut squares) = (Data::row(0, residual), Data::row(0, squares));
    let mut pairs = Data::row(0, &vec![0u8; k * PAIR_BYTES]);
    let x = Data::row(0, x);
    device().take_topk(x.view(), residual.view_mut(), squares.view_mut(), pairs.view_mut());
    (residual.read(), squares.read(), pairs.read())
}

/// Indices and the bits of their values. Hardware differs in the bits of a NaN that it computes.
fn pairs(bytes: &[u8]) -> Vec<(u32, u32)> {
    let number = |at: &[u8]| u32::from_le_bytes(at.try_into().unwrap());
    let value = |bits: u32| if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits };
    bytes.chunks_exact(8).map(|pair| (number(&pair[..4]), value(number(&pair[4..])))).collect()
}

/// Two steps, of which the second finds what the first has left.
fn compare(what: &str, x: &[f32], k: usize) {
    let n = x.len();
    let squares: Vec<f32> = numbers::<f32>(n, 9).iter().map(|x| x * x).collect();
    let mut before = (vec![0f32; n], squares, vec![]);
    for step in 0..2 {
        let expected = on_cpu(x, &before.0, &before.1, k);
        let got = on_device(x, &before.0, &before.1, k);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got.0), bits(&expected.0), "residual of {k} of {n} {what}, step {step}");
        assert_eq!(bits(&got.1), bits(&expected.1), "squares of {k} of {n} {what}, step {step}");
        assert_eq!(pairs(&got.2), pairs(&expected.2), "pairs of {k} of {n} {what}, step {step}");
        before = expected;
    }
}

#[test]
fn the_selection_is_that_of_the_cpu() {
    for n in LENGTHS {
        for k in [0, 1, 2, n / 100, n / 3, n.saturating_sub(1), n] {
            let k = k.min(n);
            compare("normal", &numbers::<f32>(n, 5), k);
            compare("zeros", &vec![0.0; n], k);
        }
    }
}

#[test]
fn nan_and_infinity_are_taken_first() {
    let mut x = numbers::<f32>(5000, 8);
    (x[4000], x[17], x[30]) = (f32::INFINITY, f32::NAN, f32::NEG_INFINITY);
    for k in [1, 2, 3, 50] {
        compare("with NaN and infinities", &x, k);
    }
}

/// With equal squares, the ratios are in the order of the magnitudes. Of many equal ones, the first are taken.
#[test]
fn ties_go_to_the_lower_index() {
    for n in [17, 1000, 20_003] {
        let x: Vec<f32> = integers(n, 7, 6).iter().map(|x| *x as f32 - 3.0).collect();
        for k in [1, n / 10, n / 2] {
            let (_, _, pairs) = on_device(&x, &vec![0.0; n], &vec![1.0; n], k);
            let indices: Vec<usize> = pairs
                .as_chunks::<PAIR_BYTES>()
                .0
                .iter()
                .map(|pair| u64::from_le_bytes(*pair) as u32 as usize)
                .collect();
            assert_eq!(indices, reference::indices(&to_f64(&x), k), "{k} of {n}");
        }
    }
}

#[test]
fn squares_follow_what_was_sent() {
    for n in LENGTHS {
        let (x, squares) = (numbers::<f32>(n, 1), numbers::<f32>(n, 2));
        let squares: Vec<f32> = squares.iter().map(|x| x * x).collect();
        let mut expected = squares.clone();
        top_k::update_squares(&Cpu::new(1), &x, &mut expected);
        let mut got = Data::row(0, &squares);
        device().follow_squares(Data::row(0, &x).view(), got.view_mut());
        assert_eq!(got.read::<f32>(), expected, "{n}");
    }
}

fn pairs_of(indices: &[u32], values: &[f32]) -> Vec<u8> {
    let pair = |(index, value): (&u32, &f32)| {
        ((value.to_bits() as u64) << 32 | *index as u64).to_le_bytes()
    };
    indices.iter().zip(values).flat_map(pair).collect()
}

/// The lists of several ranks after one another: pairs with the same index are added in their order.
#[test]
fn pairs_are_added_in_order() {
    for (n, len, first) in [(0, 5, 0), (1, 1, 3), (3000, 70, 1000), (5000, 100_000, 7)] {
        let indices: Vec<u32> = integers(n, len, 1).iter().map(|i| i + first as u32).collect();
        let pairs = pairs_of(&indices, &numbers::<f32>(n, 2));
        let before = numbers::<f32>(len, 3);
        let mut expected = before.clone();
        top_k::add_pairs(&pairs, first, &mut expected);
        let mut out = Data::row(0, &before);
        device().add_pairs(Data::row(0, &pairs).view(), first, out.view_mut());
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&out.read::<f32>()), bits(&expected), "{n} pairs of {len}");
    }
}

#[test]
fn pairs_below_an_index_are_counted() {
    let mut indices = integers(500, 10_000, 1);
    indices.sort_unstable();
    let pairs = Data::row(0, &pairs_of(&indices, &numbers::<f32>(500, 2)));
    for index in [0, 1, 17, 5000, 9999, 10_000, 1 << 33] {
        let expected = indices.iter().filter(|i| (**i as usize) < index).count();
        assert_eq!(device().pairs_below(pairs.view(), index), expected, "below {index}");
    }
    assert_eq!(device().pairs_below(Data::row::<u8>(0, &[]).view(), 5), 0);
}
