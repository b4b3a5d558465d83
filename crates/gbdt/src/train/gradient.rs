//! Gradients as integers. Sums of integers do not depend on their order, so histograms are the same for any number of
//! ranks and threads.
//!
//! A packed pair is `gradient << 32 | hessian`: the gradient is signed, the hessian is not negative. One addition adds
//! both, and a sum is exact as long as all hessians of all ranks together are below 2³² and all absolute gradients below
//! 2³¹. The scales of a round are the largest powers of two for which that holds, so a sum over 2²⁰ rows keeps at least
//! ten bits of the mean gradient. Values are rounded up or down at random, with a probability that makes their mean
//! exact; the random number is a hash of seed, round and row. Leaf values are not computed from packed pairs but from
//! sums with 62 bits (`leaf.rs`).

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;

use crate::collective::power_of_two_below;
use crate::error::Result;
use crate::par::{Disjoint, for_each, map, pieces};

/// First and second derivative of the loss of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pair {
    pub g: f32,
    pub h: f32,
}

/// Adds a sum to another.
pub fn gradient_of(packed: i64) -> i64 {
    packed >> 32
}

pub fn hessian_of(packed: i64) -> i64 {
    packed & 0xffff_ffff
}

/// Factors from derivatives to integers; powers of two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    pub g: f64,
    pub h: f64,
    /// Factors for sums with 62 bits.
    pub fine_g: f64,
    pub fine_h: f64,
}

/// Rows that a thread converts at a time.
const GRAIN: usize = 1 << 16;

/// Scales for the pairs of all ranks. `rows` is the number of rows of all ranks, at most 2³⁰. Collective: two all-reduces
/// of 16 bytes.
pub fn scales(group: &Group, team: &Team, pairs: &[Pair], rows: u64) -> Result<Scales> {
    let parts = pieces(pairs.len(), GRAIN, usize::MAX);
    let largest = map(team, parts.len(), &|part| {
        pairs[parts[part].clone()].iter().fold((0.0f32, 0.0f32), |(g, h), pair| {
            (if pair.g.abs() > g { pair.g.abs() } else { g }, if pair.h > h { pair.h } else { h })
        })
    });
    let mut most = largest
        .iter()
        .fold([0.0f64; 2], |[g, h], part| [g.max(f64::from(part.0)), h.max(f64::from(part.1))]);
    group.all_reduce(&mut most, Op::Max)?;
    // Sums in units of 2⁻³⁰ of the largest, exact.
    let unit = |most: f64| if most > 0.0 { (1u64 << 30) as f64 / most } else { 0.0 };
    let (unit_g, unit_h) = (unit(most[0]), unit(most[1]));
    let partial = map(team, parts.len(), &|part| {
        pairs[parts[part].clone()].iter().fold((0i64, 0i64), |(g, h), pair| {
            let units = (f64::from(pair.g.abs()) * unit_g, f64::from(pair.h) * unit_h);
            (g + units.0 as i64 + 1, h + units.1 as i64 + 1)
        })
    });
    let mut sums = partial.iter().fold([0i64; 2], |[g, h], part| [g + part.0, h + part.1]);
    group.all_reduce(&mut sums, Op::Sum)?;
    // Rounding adds less than one to each row.
    let scale = |limit: u64, most: f64, unit: f64, sum: i64| match most > 0.0 {
        true => power_of_two_below((limit - 1 - rows) as f64 / (sum as f64 / unit)),
        false => 1.0,
    };
    Ok(Scales {
        g: scale(1 << 31, most[0], unit_g, sums[0]),
        h: scale(1 << 32, most[1], unit_h, sums[1]),
        fine_g: scale(1 << 61, most[0], unit_g, sums[0]),
        fine_h: scale(1 << 61, most[1], unit_h, sums[1]),
    })
}

/// The rounding of a tree of a round.
#[derive(Clone, Copy)]
pub struct Dither {
    pub seed: u64,
    /// Number of the tree.
    pub tree: u64,
    /// Global number of the first row.
    pub first_row: u64,
}

/// Packs pairs.
pub fn pack(team: &Team, pairs: &[Pair], scales: &Scales, dither: Dither, out: &mut [i64]) {
    let parts = pieces(pairs.len(), GRAIN, usize::MAX);
    let key = hash(dither.seed ^ hash(dither.tree));
    let target = Disjoint::new(out);
    for_each(team, parts.len(), &|part| {
        let range = parts[part].clone();
        // SAFETY: the parts are disjoint.
        let out = unsafe { target.range(range.clone()) };
        for ((row, pair), out) in range.clone().zip(&pairs[range]).zip(out) {
            let noise = hash(key ^ (dither.first_row + row as u64));
            let unit = 1.0 / (1u64 << 32) as f64;
            let (a, b) = ((noise as u32) as f64 * unit, (noise >> 32) as f64 * unit);
            let g = floor(f64::from(pair.g) * scales.g + a);
            let h = floor(f64::from(pair.h) * scales.h + b);
            *out = (g << 32) + h;
        }
    });
}

/// The largest integer that is at most `x`, which fits.
#[inline]
fn floor(x: f64) -> i64 {
    let cut = x as i64;
    cut - i64::from((cut as f64) > x)
}

/// The finalizer of SplitMix64, a bijection of 64-bit numbers.
#[inline]
fn hash(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::{on_threads, shard_range, single_rank};

    fn pairs(count: usize) -> Vec<Pair> {
        (0..count)
            .map(|i| Pair { g: ((i * 7919) % 1000) as f32 / 500.0 - 1.0, h: (i % 7) as f32 / 7.0 })
            .collect()
    }

    #[test]
    fn sums_fit_and_are_close() {
        for (count, size) in [(1, 1.0f32), (5, 1e-30), (1000, 1e20), (100_000, 1.0)] {
            let mut pairs = pairs(count);
            pairs.iter_mut().for_each(|pair| (pair.g, pair.h) = (pair.g * size, pair.h * size));
            let (team, group) = (Team::new(1), single_rank());
            let scales = scales(&group, &team, &pairs, count as u64).unwrap();
            let mut packed = vec![0; count];
            let dither = Dither { seed: 1, tree: 2, first_row: 0 };
            pack(&team, &pairs, &scales, dither, &mut packed);
            let absolute: i64 = packed.iter().map(|p| gradient_of(*p).abs()).sum();
            let hessians: i64 = packed.iter().map(|p| hessian_of(*p)).sum();
            assert!(absolute < 1 << 31 && hessians < 1 << 32, "{count}: {absolute} {hessians}");
            let exact: f64 = pairs.iter().map(|pair| f64::from(pair.g)).sum();
            let found = gradient_of(packed.iter().sum()) as f64 / scales.g;
            let tolerance = (count as f64).sqrt() * 3.0 / scales.g;
            assert!((found - exact).abs() <= tolerance, "{count}: {found} {exact}");
        }
    }

    #[test]
    fn packed_pairs_do_not_depend_on_the_ranks() {
        let all = pairs(1001);
        let packed = |ranks: usize| {
            let parts = on_threads(ranks, |world| {
                let range = shard_range(all.len(), ranks, world.rank());
                let team = Team::new(2);
                let scales = scales(&world, &team, &all[range.clone()], 1001).unwrap();
                let mut out = vec![0; range.len()];
                let dither = Dither { seed: 3, tree: 1, first_row: range.start as u64 };
                pack(&team, &all[range], &scales, dither, &mut out);
                out
            });
            parts.concat()
        };
        let alone = packed(1);
        assert!([2, 3, 8].into_iter().all(|ranks| packed(ranks) == alone));
    }

    #[test]
    fn zero_gradients_are_zero() {
        let (team, group) = (Team::new(1), single_rank());
        let pairs = vec![Pair::default(); 3];
        let scales = scales(&group, &team, &pairs, 3).unwrap();
        let mut packed = vec![1; 3];
        pack(&team, &pairs, &scales, Dither { seed: 0, tree: 0, first_row: 0 }, &mut packed);
        assert_eq!(packed, [0; 3]);
    }
}
