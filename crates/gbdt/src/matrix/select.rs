//! Exact weighted quantiles of values that are spread over ranks. The answer is a property of all values together, so
//! it does not depend on how many ranks hold them.

use lockstep_comm::{Group, Op};

use crate::error::Result;

/// Values of one rank in increasing order, as keys, with their weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sorted {
    keys: Vec<u32>,
    /// Sum of the weights of the keys up to each one. `None` if all weights are 1.
    sums: Option<Vec<u64>>,
}

/// A key with the order of the value. Zeros of both signs are equal.
pub fn key_of(value: f32) -> u32 {
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Inverse of [`key_of`].
pub fn value_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

impl Sorted {
    /// Sorts values of weight 1.
    pub fn of(values: &[f32]) -> Sorted {
        let mut keys: Vec<u32> = values.iter().map(|value| key_of(*value)).collect();
        sort_keys(&mut keys);
        Sorted { keys, sums: None }
    }

    /// Sorts (value, weight) pairs.
    pub fn weighted(pairs: impl Iterator<Item = (f32, u32)>) -> Sorted {
        let word = |(value, weight)| u64::from(key_of(value)) << 32 | u64::from(weight);
        let mut words: Vec<u64> = pairs.map(word).collect();
        words.sort_unstable();
        let sum = |sum: &mut u64, word: &u64| {
            *sum += word & 0xffff_ffff;
            Some(*sum)
        };
        let sums = words.iter().scan(0, sum).collect();
        Sorted { keys: words.iter().map(|word| (word >> 32) as u32).collect(), sums: Some(sums) }
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// The smallest and the largest key.
    pub fn ends(&self) -> Option<(u32, u32)> {
        Some((*self.keys.first()?, *self.keys.last()?))
    }

    /// Sum of all weights.
    pub fn total(&self) -> u64 {
        self.up_to(u32::MAX)
    }

    /// Sum of the weights of keys up to `key`.
    fn up_to(&self, key: u32) -> u64 {
        let count = self.keys.partition_point(|other| *other <= key);
        match &self.sums {
            None => count as u64,
            Some(sums) => count.checked_sub(1).map_or(0, |last| sums[last]),
        }
    }

    /// The distinct keys, or the first `most + 1` of them if there are more.
    pub fn distinct(&self, most: usize) -> Vec<u32> {
        let (mut found, mut at) = (Vec::new(), 0);
        while at < self.keys.len() && found.len() <= most {
            let key = self.keys[at];
            found.push(key);
            // Equal keys are often few, so look ahead in growing steps.
            let mut step = 1;
            while at + step < self.keys.len() && self.keys[at + step] == key {
                step *= 2;
            }
            let end = (at + step).min(self.keys.len());
            at += self.keys[at..end].partition_point(|other| *other == key);
        }
        found
    }
}

/// A question: the smallest key of a list up to which the weights of all ranks add up to at least `weight`, which is
/// between 1 and the total.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    pub list: usize,
    pub weight: u64,
}

/// Answers all targets. The lists of all ranks must have at least the asked weights. Collective.
///
/// 32 all-reduces of 8 bytes per target; none in a group of one.
pub fn select(group: &Group, lists: &[Sorted], targets: &[Target]) -> Result<Vec<u32>> {
    if group.size() == 1 {
        return Ok(targets.iter().map(|target| lists[target.list].reach(target.weight)).collect());
    }
    let mut ranges = vec![(0u32, u32::MAX); targets.len()];
    let mut sums = vec![0i64; targets.len()];
    for _ in 0..u32::BITS {
        for ((target, (low, high)), sum) in targets.iter().zip(&ranges).zip(&mut sums) {
            *sum = lists[target.list].up_to(low + (high - low) / 2) as i64;
        }
        group.all_reduce(&mut sums, Op::Sum)?;
        for ((target, (low, high)), sum) in targets.iter().zip(&mut ranges).zip(&sums) {
            let middle = *low + (*high - *low) / 2;
            if *sum as u64 >= target.weight {
                *high = middle;
            } else {
                *low = middle.saturating_add(1).min(*high);
            }
        }
    }
    Ok(ranges.into_iter().map(|(_, high)| high).collect())
}

impl Sorted {
    /// The smallest key up to which the weights add up to at least `weight`.
    fn reach(&self, weight: u64) -> u32 {
        let at = match &self.sums {
            None => weight.saturating_sub(1) as usize,
            Some(sums) => sums.partition_point(|sum| *sum < weight),
        };
        self.keys.get(at).or(self.keys.last()).copied().unwrap_or(0)
    }
}

/// Sorts keys: least significant digits first, eleven bits at a time; short lists by comparison.
fn sort_keys(keys: &mut Vec<u32>) {
    const BITS: u32 = 11;
    const DIGITS: usize = 1 << BITS;
    if keys.len() < 4 * DIGITS {
        return keys.sort_unstable();
    }
    let mut counts = vec![[0usize; DIGITS]; 3];
    for key in keys.iter() {
        for (pass, counts) in counts.iter_mut().enumerate() {
            counts[(key >> (BITS * pass as u32)) as usize % DIGITS] += 1;
        }
    }
    let mut other = vec![0; keys.len()];
    for (pass, counts) in counts.iter_mut().enumerate() {
        let shift = BITS * pass as u32;
        if counts[(keys[0] >> shift) as usize % DIGITS] == keys.len() {
            continue;
        }
        let mut start = 0;
        for count in counts.iter_mut() {
            start += std::mem::replace(count, start);
        }
        for key in keys.iter() {
            let at = &mut counts[(key >> shift) as usize % DIGITS];
            other[*at] = *key;
            *at += 1;
        }
        std::mem::swap(keys, &mut other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::{on_threads, shard_range};

    #[test]
    fn keys_have_the_order_of_values() {
        let values = [f32::MIN, -1.0, -1e-40, 0.0, 1e-40, 0.5, 1.0, f32::MAX];
        for pair in values.windows(2) {
            assert!(key_of(pair[0]) < key_of(pair[1]));
        }
        for value in values {
            assert_eq!(value_of(key_of(value)), value);
        }
        assert_eq!(key_of(-0.0), key_of(0.0));
    }

    #[test]
    fn radix_equals_comparison() {
        for count in [0, 1, 100, 8192, 50_001] {
            let mut keys: Vec<u32> =
                (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ (i << 7)).collect();
            let mut expected = keys.clone();
            expected.sort_unstable();
            sort_keys(&mut keys);
            assert!(keys == expected, "{count}");
        }
    }

    #[test]
    fn quantiles_do_not_depend_on_the_ranks() {
        let values: Vec<f32> = (0..501).map(|i| ((i * 7919) % 103) as f32 - 50.0).collect();
        let weight = |i: usize| (i % 5) as u32;
        let targets: Vec<Target> =
            (1..40).map(|k| Target { list: 0, weight: 25 * k as u64 }).collect();
        for weighted in [false, true] {
            let answer = |ranks: usize| {
                on_threads(ranks, |world| {
                    let range = shard_range(values.len(), ranks, world.rank());
                    let list = match weighted {
                        true => Sorted::weighted(range.map(|i| (values[i], weight(i)))),
                        false => Sorted::of(&values[range]),
                    };
                    let most = if weighted { 39 } else { 20 };
                    select(&world, &[list], &targets[..most]).unwrap()
                })
            };
            let alone = answer(1);
            for ranks in [2, 3, 7] {
                assert!(answer(ranks).iter().all(|found| *found == alone[0]), "{ranks}");
            }
        }
    }

    #[test]
    fn distinct_values_stop_at_the_limit() {
        let list = Sorted::of(&[3.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0, -0.0, 0.0]);
        let values = |most| list.distinct(most).into_iter().map(value_of).collect::<Vec<_>>();
        assert_eq!(values(10), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(values(2), [0.0, 1.0, 2.0]);
    }
}
