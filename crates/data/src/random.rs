//! Counter-based random numbers: functions of a key, computed in any order on any rank. Not cryptographic.

/// Hashes several words to one. Every output bit depends on every input bit and on the order of the words.
pub fn hash(words: &[u64]) -> u64 {
    words.iter().fold(GOLDEN_GAMMA, |state, word| mix(state ^ word).wrapping_add(GOLDEN_GAMMA))
}

/// A stream of random numbers for one key.
#[derive(Clone, Debug)]
pub struct Stream {
    state: u64,
}

impl Stream {
    pub fn new(key: u64) -> Stream {
        Stream { state: key }
    }

    /// 64 random bits: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        mix(self.state)
    }

    /// Uniform in [0, 1), in steps of 2⁻⁵³.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (-53f64).exp2()
    }
}

/// 2⁶⁴ divided by the golden ratio, made odd.
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finalizer of SplitMix64, a bijection of 64-bit numbers.
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
    fn one_input_bit_flips_about_half_of_the_output() {
        for bit in 0..64 {
            let flipped: u32 =
                (0..256).map(|i| (hash(&[i, 7]) ^ hash(&[i ^ (1 << bit), 7])).count_ones()).sum();
            let mean = f64::from(flipped) / 256.0;
            assert!((30.0..34.0).contains(&mean), "bit {bit} flips {mean} bits");
        }
    }

    #[test]
    fn uniform_numbers_are_uniform() {
        let mut stream = Stream::new(3);
        let mut counts = [0u32; 16];
        for _ in 0..16_000 {
            counts[(stream.unit() * 16.0) as usize] += 1;
        }
        // 1,000 each, give or take four standard deviations of 31.
        assert!(counts.iter().all(|c| (876..1124).contains(c)), "{counts:?}");
    }
}
