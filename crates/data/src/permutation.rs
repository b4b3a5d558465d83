//! A shuffle that is computed, not stored: a keyed permutation of `0..n`. Never allocates; identical on every machine.
//!
//! A Feistel network permutes the numbers of b bits, where 2ᵇ is the smallest power that holds `n`; a
//! result of `n` or more goes through the network again until it is smaller (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains"). Since 2ᵇ < 2n, that takes less than two passes on
//! average.

use crate::random::hash;

/// Feistel rounds. Luby and Rackoff need four; the smallest domains need more.
const ROUNDS: u64 = 8;

/// A shuffle of `0..n`.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    key: u64,
    n: u64,
    /// Bits of the low and of the high half; the high half has the same number or one less.
    low: u32,
    high: u32,
}

impl Permutation {
    /// ```
    /// use lockstep_data::Permutation;
    ///
    /// let shuffle = Permutation::new(7, 5);
    /// let mut places: Vec<u64> = (0..5).map(|i| shuffle.place(i)).collect();
    /// places.sort();
    /// assert_eq!(places, [0, 1, 2, 3, 4]);
    /// ```
    pub fn new(key: u64, n: u64) -> Permutation {
        let bits = u64::BITS - n.saturating_sub(1).leading_zeros();
        Permutation { key, n, low: bits.div_ceil(2), high: bits / 2 }
    }

    /// The element at position `i` after the shuffle.
    pub fn place(&self, i: u64) -> u64 {
        assert!(i < self.n, "position {i} is out of range: the shuffle has {} elements", self.n);
        let mut x = self.network(i);
        while x >= self.n {
            x = self.network(x);
        }
        x
    }

    /// Each round is its own inverse, so the whole is a permutation of the numbers of `low + high` bits.
    fn network(&self, x: u64) -> u64 {
        let (low_mask, high_mask) = ((1 << self.low) - 1, (1 << self.high) - 1);
        let (mut low, mut high) = (x & low_mask, x >> self.low);
        for round in 0..ROUNDS / 2 {
            high ^= hash(&[self.key, 2 * round, low]) & high_mask;
            low ^= hash(&[self.key, 2 * round + 1, high]) & low_mask;
        }
        high << self.low | low
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_bijection(key: u64, n: u64) {
        let shuffle = Permutation::new(key, n);
        let mut seen = vec![false; n as usize];
        for i in 0..n {
            let place = shuffle.place(i) as usize;
            assert!(!seen[place], "key {key}, n {n}: {place} appears twice");
            seen[place] = true;
        }
    }

    #[test]
    fn sizes_up_to_two_thousand_are_bijections() {
        (1..=2000).for_each(|n| is_bijection(n ^ 0x51, n));
    }

    #[test]
    fn large_sizes_are_bijections() {
        for n in [65_535, 65_536, 65_537, 1_000_003] {
            is_bijection(9, n);
        }
    }

    #[test]
    fn largest_sizes_stay_in_range() {
        for n in [u64::from(u32::MAX) + 2, (1 << 62) + 1, u64::MAX] {
            let shuffle = Permutation::new(1, n);
            let ends = [0, 1, n / 2, n - 1].map(|i| shuffle.place(i));
            assert!(ends.iter().all(|p| *p < n), "{n}: {ends:?}");
        }
    }

    #[test]
    fn first_element_is_uniform() {
        for n in [2, 3, 5, 6, 7, 12] {
            let keys = 3000 * n;
            let mut first = vec![0u64; n as usize];
            for key in 0..keys {
                first[Permutation::new(key, n).place(0) as usize] += 1;
            }
            // 3,000 each; five standard deviations are at most 274.
            assert!(first.iter().all(|c| c.abs_diff(3000) < 274), "n {n}: {first:?}");
        }
    }

    proptest! {
        #[test]
        fn any_key_and_size_is_a_bijection(key: u64, n in 1u64..5000) {
            is_bijection(key, n);
        }

        #[test]
        fn keys_give_different_shuffles(key: u64) {
            let order = |key| (0..64).map(|i| Permutation::new(key, 64).place(i)).collect::<Vec<_>>();
            prop_assert_ne!(order(key), order(key.wrapping_add(1)));
        }
    }
}
