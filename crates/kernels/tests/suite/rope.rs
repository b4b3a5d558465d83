//! Rotary embedding against the reference, and its defining property: dot products depend only on distances.

use half::bf16;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::rope::{self, Positions, Rope};
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::reference::rope as reference;
use lockstep_kernels::{RopeScaling, RopeTable};

const THETA: f64 = 10_000.0;

fn numbers<E: Float>(len: usize) -> Vec<E> {
    (0..len).map(|i| E::round_from(((i * 7919) % 4001) as f32 / 2000.0 - 1.0)).collect()
}

/// heads, head_dim, rows, columns before, columns after
const CASES: [[usize; 5]; 6] = [
    [1, 2, 1, 0, 0],
    [3, 8, 7, 0, 24],
    [2, 32, 65, 5, 3],
    [5, 64, 12, 0, 64],
    [2, 10, 9, 1, 1],
    [4, 128, 33, 0, 0],
];

fn matches_the_reference<E: Float>(
    cpu: &Cpu,
    [heads, head_dim, rows, before, after]: [usize; 5],
    tolerance: f64,
) {
    let stride = before + heads * head_dim + after;
    let table = RopeTable::new(head_dim, 200, THETA, None);
    let list: Vec<u32> = (0..rows as u32).map(|r| (r * 37 + 11) % 200).collect();
    let ways = [
        Positions::From { start: 0, len: rows },
        Positions::From { start: 100, len: rows.div_ceil(2) },
        Positions::List(&list),
    ];
    for (positions, back) in ways.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let rope = Rope { table: &table, rows, heads, offset: before, stride, positions };
        let was: Vec<E> = numbers(rows * stride);
        let mut ours = was.clone();
        if back {
            rope::backward(cpu, &mut ours, &rope)
        } else {
            rope::forward(cpu, &mut ours, &rope)
        }
        for (row, (ours, was)) in ours.chunks(stride).zip(was.chunks(stride)).enumerate() {
            let position = match positions {
                Positions::From { start, len } => start + row % len,
                Positions::List(list) => list[row] as usize,
            };
            let mut expected: Vec<f64> = was.iter().map(|x| f64::from(x.as_f32())).collect();
            for head in expected[before..before + heads * head_dim].chunks_mut(head_dim) {
                let turn = if back { reference::backward } else { reference::forward };
                turn(head, position as f64, THETA);
            }
            for (column, (ours, expected)) in ours.iter().zip(expected).enumerate() {
                let apart = (f64::from(ours.as_f32()) - expected).abs();
                assert!(
                    apart <= tolerance,
                    "row {row}, column {column}: {apart:.1e} apart at {:?}",
                    cpu.level
                );
            }
        }
    }
}

#[test]
fn matches_the_reference_at_every_level() {
    for level in Level::of_this_machine().and_below() {
        for cpu in [Cpu::at(level, 1), Cpu::at(level, 2)] {
            for case in CASES {
                matches_the_reference::<f32>(&cpu, case, 1e-6);
                matches_the_reference::<bf16>(&cpu, case, 1e-2);
            }
        }
    }
}

/// <R(a) q, R(b) k> depends on a - b only.
#[test]
fn dot_products_depend_only_on_distances() {
    let (cpu, table) = (Cpu::new(1), RopeTable::new(64, 1000, THETA, None));
    let product = |a: usize, b: usize| -> f64 {
        let turned = |x: &[f32], start| {
            let mut x = x.to_vec();
            let positions = Positions::From { start, len: 1 };
            rope::forward(
                &cpu,
                &mut x,
                &Rope { table: &table, rows: 1, heads: 1, offset: 0, stride: 64, positions },
            );
            x
        };
        let both: Vec<f32> = numbers(128);
        let (q, k) = (turned(&both[..64], a), turned(&both[64..], b));
        q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(k)).sum()
    };
    assert!((product(17, 5) - product(912, 900)).abs() < 1e-4);
    assert!((product(17, 5) - product(18, 5)).abs() > 1e-2);
}

#[test]
fn backward_inverts_forward() {
    let (cpu, table) = (Cpu::new(2), RopeTable::new(16, 50, THETA, None));
    let was: Vec<f32> = numbers(100 * 48);
    let positions = Positions::From { start: 0, len: 50 };
    let rope = Rope { table: &table, rows: 100, heads: 3, offset: 0, stride: 48, positions };
    let mut data = was.clone();
    rope::forward(&cpu, &mut data, &rope);
    assert!(data != was);
    rope::backward(&cpu, &mut data, &rope);
    assert!(data.iter().zip(was).all(|(a, b)| (a - b).abs() < 1e-6));
}

/// With the settings of Llama 3.1, high frequencies stay, low ones are divided by eight, and some are in between.
#[test]
fn llama3_scaling_reduces_low_frequencies() {
    let scaling = RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };
    let plain = RopeTable::new(128, 2, 500_000.0, None);
    let slowed = RopeTable::new(128, 2, 500_000.0, Some(scaling));
    // At position 1 the sine of a low frequency is the frequency itself.
    let ratio = |i: usize| f64::from(plain.at(1).1[i]) / f64::from(slowed.at(1).1[i]);
    assert!((0..=28).all(|i| ratio(i) == 1.0));
    assert!((36..64).all(|i| (ratio(i) - 8.0).abs() < 1e-4));
    assert!(
        (29..35).all(|i| ratio(i) > 1.0 && ratio(i) < 8.0),
        "{:?}",
        (28..37).map(ratio).collect::<Vec<_>>()
    );
    // frequency_i = 500000^(-i / 64); at i = 32, 8192 frequency / 2 pi = 1.843848 turns; weight (t - 1) / 3 = 0.281283;
    // the frequency is multiplied by 0.281283 + 0.718717 / 8 = 0.371122.
    assert!((ratio(32) - 1.0 / 0.371_122).abs() < 1e-4, "{}", ratio(32));
}

#[test]
#[should_panic(expected = "position 12 is out of range: the table has 12 positions")]
fn positions_outside_the_table_panic() {
    let table = RopeTable::new(4, 12, THETA, None);
    let positions = Positions::From { start: 9, len: 4 };
    let rope = Rope { table: &table, rows: 8, heads: 1, offset: 0, stride: 4, positions };
    rope::forward(&Cpu::new(1), &mut [0f32; 32], &rope);
}
