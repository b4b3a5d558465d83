//! Chance without state: numbers that follow from a key and a counter alone, so that any of them can be
//! had at any time, in any order, on any rank. Not for secrets.

/// One number from several: every bit of the answer hangs on every bit of `words`, and on their order.
pub fn hash(words: &[u64]) -> u64 {
    words.iter().fold(SOME_ODD_BITS, |state, word| mix(state ^ word).wrapping_add(SOME_ODD_BITS))
}

/// An endless row of numbers under one key.
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
}

impl Dice {
    pub fn new(key: u64) -> Dice {
        Dice { state: key }
    }

    /// 64 fair bits: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(SOME_ODD_BITS);
        mix(self.state)
    }

    /// At least 0 and below 1, in steps of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (-53f64).exp2()
    }
}

/// 2⁶⁴ divided by the golden ratio, made odd.
const SOME_ODD_BITS: u64 = 0x9e37_79b9_7f4a_7c15;

/// A permutation of the 64-bit numbers that leaves no pattern: the finalizer of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_number_of_words_matter() {
        let all = [hash(&[]), hash(&[0]), hash(&[0, 0]), hash(&[1, 2]), hash(&[2, 1])];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{all:x?}");
        }
    }

    #[test]
    fn a_bit_of_the_input_turns_about_half_of_the_output() {
        for bit in 0..64 {
            let turned: u32 =
                (0..256).map(|i| (hash(&[i, 7]) ^ hash(&[i ^ (1 << bit), 7])).count_ones()).sum();
            let mean = f64::from(turned) / 256.0;
            assert!((30.0..34.0).contains(&mean), "bit {bit} turns {mean} bits");
        }
    }

    #[test]
    fn units_are_spread_evenly() {
        let mut dice = Dice::new(3);
        let mut counts = [0u32; 16];
        for _ in 0..16_000 {
            counts[(dice.unit() * 16.0) as usize] += 1;
        }
        // 1,000 each, give or take four standard deviations of 31.
        assert!(counts.iter().all(|c| (876..1124).contains(c)), "{counts:?}");
    }
}
