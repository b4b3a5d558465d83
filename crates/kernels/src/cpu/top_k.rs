//! Exact selection of the k largest magnitudes of a buffer by radix counting, for top-k gradient compression. Of equal
//! magnitudes the first are taken, so the result does not depend on the number of threads.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_blocks, by_rows, parallel_for};
use super::simd::multiversion;

/// Bytes of an index (u32) and a value (f32).
pub const PAIR_BYTES: usize = 8;

/// Elements that are tested together before any is tested individually.
const BLOCK: usize = 16;

/// The 31 bits of a magnitude as three digits, the highest first: position and number of bits. The first digit has the
/// eight exponent bits and three more, a resolution of 9 %.
const DIGITS: [(u32, u32); 3] = [(20, 11), (10, 10), (0, 10)];

/// Number of values of the first digit.
const FIRST_DIGIT_VALUES: usize = 1 << DIGITS[0].1;

/// Moves the elements with the `pairs.len() / PAIR_BYTES` largest magnitudes from `x` to `pairs`, leaving zeros. Pairs of
/// index and value are in the order of the indices. NaN counts as larger than infinity.
pub fn take_top_k(cpu: &Cpu, x: &mut [f32], pairs: &mut [u8]) {
    let k = pairs.len() / PAIR_BYTES;
    assert!(
        pairs.len().is_multiple_of(PAIR_BYTES),
        "{} bytes are not a multiple of a pair",
        pairs.len()
    );
    assert!(k <= x.len(), "k={k} exceeds the {} elements", x.len());
    assert!(x.len() <= u32::MAX as usize, "{} elements exceed the range of u32 indices", x.len());
    if k > 0 {
        let (least, equal) = threshold(cpu, x, k);
        let taken = take(cpu.level, x, least, equal, pairs);
        assert_eq!(taken, k, "the number of elements taken equals the number counted");
    }
}

/// Decay of the mean squares per step, like beta2 of Adam.
const DECAY: f32 = 0.95;

/// Minimum of a mean square, which keeps it far from the subnormal range.
const MIN_SQUARE: f32 = 1e-30;

/// Added to the denominator, as in Adam.
const EPS: f32 = 1e-8;

/// Like [`take_top_k`], but compares each magnitude with the root mean square of earlier elements at its index. `squares`
/// are decaying means of the squares of the elements taken, and are updated. `ratios` is scratch of the same length.
pub fn take_top_k_normalized(
    cpu: &Cpu,
    x: &mut [f32],
    squares: &mut [f32],
    ratios: &mut [f32],
    pairs: &mut [u8],
) {
    let lens = [squares.len(), ratios.len()];
    assert!(lens.iter().all(|len| *len == x.len()), "{} elements, and {lens:?}", x.len());
    parallel_for(
        &cpu.team,
        x.len(),
        GRAIN_SIZE,
        (by_rows(squares, 1), by_rows(ratios, 1)),
        |range, (squares, ratios)| {
            divide(cpu.level, &x[range], squares, ratios);
        },
    );
    take_top_k(cpu, ratios, pairs);
    for pair in pairs.as_chunks_mut::<PAIR_BYTES>().0 {
        let index = u64::from_le_bytes(*pair) as u32 as usize;
        let value = std::mem::take(&mut x[index]);
        *pair = ((value.to_bits() as u64) << 32 | index as u64).to_le_bytes();
        squares[index] += contribution(value);
    }
}

/// Updates the mean squares with elements that were all taken.
pub fn update_squares(cpu: &Cpu, x: &[f32], squares: &mut [f32]) {
    assert_eq!(x.len(), squares.len(), "x and squares must have equal length");
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(squares, 1), |range, squares| {
        for (square, x) in squares.iter_mut().zip(&x[range]) {
            *square = (*square * DECAY).max(MIN_SQUARE) + contribution(*x);
        }
    });
}

/// Adds pairs to a buffer whose first element has the index `first`.
pub fn add_pairs(pairs: &[u8], first: usize, out: &mut [f32]) {
    for pair in pairs.as_chunks::<PAIR_BYTES>().0 {
        let (index, value) = read(*pair);
        out[index - first] += value;
    }
}

/// The number of pairs whose index is below `index`; they are in the order of their indices.
pub fn pairs_below(pairs: &[u8], index: usize) -> usize {
    pairs.as_chunks::<PAIR_BYTES>().0.partition_point(|pair| read(*pair).0 < index)
}

fn read(pair: [u8; PAIR_BYTES]) -> (usize, f32) {
    let word = u64::from_le_bytes(pair);
    (word as u32 as usize, f32::from_bits((word >> 32) as u32))
}

/// Contribution of an element to its mean square; zero if it is not finite.
fn contribution(x: f32) -> f32 {
    let square = x * x * (1.0 - DECAY);
    if square.is_finite() { square } else { 0.0 }
}

/// The bits of the `k`-th largest magnitude, and how many elements equal to it are among the `k`.
fn threshold(cpu: &Cpu, x: &[f32], k: usize) -> (u32, usize) {
    let (mut high, mut left) = (0, k);
    for (shift, width) in DIGITS {
        let mut digit = (1 << width) - 1;
        with_counts(cpu, x, Digit { high, shift, width }, |counts| {
            while counts(digit) < left {
                left -= counts(digit);
                digit -= 1;
            }
        });
        high = high << width | digit as u32;
    }
    (high, left)
}

/// A digit of the magnitude, for elements whose higher digits are `high`.
#[derive(Clone, Copy)]
struct Digit {
    high: u32,
    shift: u32,
    width: u32,
}

/// Counts elements by a digit of their magnitude.
fn with_counts(
    cpu: &Cpu,
    x: &[f32],
    Digit { high, shift, width }: Digit,
    look: impl FnOnce(&dyn Fn(usize) -> usize),
) {
    // Two tables per thread, for its own range of elements.
    let run = x.len().div_ceil(cpu.team.size()).max(GRAIN_SIZE);
    let size = 1 << width;
    cpu.scratch[0].with_default(x.len().div_ceil(run) * 2 * size, |tables: &mut [u32]| {
        parallel_for(&cpu.team, x.len(), run, by_blocks(tables, 2 * size, run), |range, tables| {
            for (x, tables) in x[range].chunks(run).zip(tables.chunks_exact_mut(2 * size)) {
                match tables.as_chunks_mut::<FIRST_DIGIT_VALUES>().0 {
                    [even, odd] if shift == DIGITS[0].0 => count_all(cpu.level, x, even, odd),
                    _ => count_some(cpu.level, x, high, shift, width, &mut tables[..size]),
                }
            }
        });
        look(&|digit| tables.iter().skip(digit).step_by(size).map(|&n| n as usize).sum());
    });
}

multiversion! {
    /// Divides each element by its root mean square, after decay.
    fn divide<I>(x: &[f32], squares: &mut [f32], ratios: &mut [f32]) {
        for ((x, square), ratio) in x.iter().zip(squares).zip(ratios) {
            *square = (*square * DECAY).max(MIN_SQUARE);
            *ratio = x / (square.sqrt() + EPS);
        }
    }

    /// Counts by the first digit. Neighbours often have the same one: two tables avoid store-to-load stalls.
    fn count_all<I>(x: &[f32], even: &mut [u32; FIRST_DIGIT_VALUES], odd: &mut [u32; FIRST_DIGIT_VALUES]) {
        let (pairs, last) = x.as_chunks::<2>();
        for [a, b] in pairs {
            even[((a.to_bits() & 0x7fff_ffff) >> DIGITS[0].0) as usize] += 1;
            odd[((b.to_bits() & 0x7fff_ffff) >> DIGITS[0].0) as usize] += 1;
        }
        for x in last {
            even[((x.to_bits() & 0x7fff_ffff) >> DIGITS[0].0) as usize] += 1;
        }
    }

    fn count_some<I>(x: &[f32], high: u32, shift: u32, width: u32, counts: &mut [u32]) {
        let (blocks, rest) = x.as_chunks::<BLOCK>();
        for block in blocks {
            let mut hits = 0;
            for x in block {
                hits |= ((x.to_bits() & 0x7fff_ffff) >> (shift + width) == high) as u32;
            }
            if hits != 0 {
                count_block(block, high, shift, width, counts);
            }
        }
        count_block(rest, high, shift, width, counts);
    }

    /// Takes elements larger than `least`, and the first `equal` that are equal to it. Returns their number.
    fn take<I>(x: &mut [f32], least: u32, equal: usize, pairs: &mut [u8]) -> usize {
        let whole = x.len() / BLOCK * BLOCK;
        let mut taken = Taken { pairs: pairs.as_chunks_mut().0, count: 0, least, equal };
        let (blocks, rest) = x.as_chunks_mut::<BLOCK>();
        for (i, block) in blocks.iter_mut().enumerate() {
            let mut hits = 0;
            for x in block.iter() {
                hits |= (x.to_bits() & 0x7fff_ffff >= least) as u32;
            }
            if hits != 0 {
                taken.take(block, i * BLOCK);
            }
        }
        taken.take(rest, whole);
        taken.count
    }
}

fn count_block(x: &[f32], high: u32, shift: u32, width: u32, counts: &mut [u32]) {
    for x in x {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        // Branch-free: adding zero is cheaper than a branch misprediction.
        let counted = magnitude >> (shift + width) == high;
        counts[(magnitude >> shift) as usize & (counts.len() - 1)] += counted as u32;
    }
}

/// Progress of taking elements.
struct Taken<'a> {
    pairs: &'a mut [[u8; PAIR_BYTES]],
    count: usize,
    least: u32,
    /// Elements equal to `least` that may still be taken.
    equal: usize,
}

impl Taken<'_> {
    /// Takes from at most `BLOCK` elements starting at index `first`.
    fn take(&mut self, x: &mut [f32], first: usize) {
        // Candidates are listed without branches, which would be mispredicted.
        let (mut indices, mut listed) = ([0u8; BLOCK], 0);
        for (i, x) in x.iter().enumerate() {
            indices[listed % BLOCK] = i as u8;
            listed += (x.to_bits() & 0x7fff_ffff >= self.least) as usize;
        }
        for &i in &indices[..listed] {
            let x = &mut x[i as usize];
            let equal = x.to_bits() & 0x7fff_ffff == self.least;
            if equal && self.equal == 0 {
                continue;
            }
            self.equal -= equal as usize;
            let pair = (x.to_bits() as u64) << 32 | (first + i as usize) as u64;
            self.pairs[self.count] = pair.to_le_bytes();
            self.count += 1;
            *x = 0.0;
        }
    }
}
