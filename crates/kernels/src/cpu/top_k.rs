//! The k largest magnitudes of a buffer, exactly: found by counting digits, taken out in the order of their places.
//! Of equal ones the first are taken, so the choice is the same on any number of threads.

use super::Cpu;
use super::partition::{GRAIN_SIZE, by_blocks, by_rows, parallel_for};
use super::simd::multiversion;

/// Bytes of a place (u32) and the number there (f32).
pub const PAIR_BYTES: usize = 8;

/// Elements that are looked at together before any of them is looked at alone.
const LOOK: usize = 16;

/// A magnitude's 31 bits in three digits, the highest first: where each begins, and how many bits it has. Eight
/// exponent bits and three more tell apart 9 % of a number's size.
const DIGITS: [(u32, u32); 3] = [(20, 11), (10, 10), (0, 10)];

/// Values of the first digit.
const FIRST: usize = 1 << DIGITS[0].1;

/// Takes the elements with the `pairs.len() / PAIR_BYTES` largest magnitudes out of `x`, leaving zeros. They come in the
/// order of their places, each as place and number. NaN counts as larger than infinity: it is always among them.
pub fn take_top_k(cpu: &Cpu, x: &mut [f32], pairs: &mut [u8]) {
    let k = pairs.len() / PAIR_BYTES;
    assert!(pairs.len().is_multiple_of(PAIR_BYTES), "{} bytes are no pairs", pairs.len());
    assert!(k <= x.len(), "{k} of {} elements", x.len());
    assert!(x.len() <= u32::MAX as usize, "{} elements have no places in a u32", x.len());
    if k > 0 {
        let (least, equal) = least_taken(cpu, x, k);
        let taken = take(cpu.level, x, least, equal, pairs);
        assert_eq!(taken, k, "as many are taken as were counted");
    }
}

/// How much of a mean of squares a step keeps, as Adam's second moment usually does.
const KEEP: f32 = 0.95;

/// What a mean of squares never falls below: far from where numbers lose their digits, and computing its pace.
const LEAST: f32 = 1e-30;

/// Added to what is divided by, as in Adam.
const EPS: f32 = 1e-8;

/// Takes elements out of `x` as [`take_top_k`] does, but by their size beside what usually came from their places:
/// `squares` are decaying means of the squares of what was taken there, and follow. `ratios` is room for as many.
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
        let place = u64::from_le_bytes(*pair) as u32 as usize;
        let number = std::mem::take(&mut x[place]);
        *pair = ((number.to_bits() as u64) << 32 | place as u64).to_le_bytes();
        squares[place] += share(number);
    }
}

/// The means of squares follow numbers that were all taken.
pub fn update_squares(cpu: &Cpu, x: &[f32], squares: &mut [f32]) {
    assert_eq!(x.len(), squares.len(), "every element has its mean");
    parallel_for(&cpu.team, x.len(), GRAIN_SIZE, by_rows(squares, 1), |range, squares| {
        for (square, x) in squares.iter_mut().zip(&x[range]) {
            *square = (*square * KEEP).max(LEAST) + share(*x);
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

/// What a number adds to a mean of squares; nothing where it is none.
fn share(x: f32) -> f32 {
    let share = x * x * (1.0 - KEEP);
    if share.is_finite() { share } else { 0.0 }
}

/// The `k`-th largest magnitude, as bits, and how many that are equal to it are among the `k`.
fn least_taken(cpu: &Cpu, x: &[f32], k: usize) -> (u32, usize) {
    let (mut high, mut left) = (0, k);
    for (shift, width) in DIGITS {
        let mut digit = (1 << width) - 1;
        with_counts(cpu, x, high, shift, width, |counts| {
            while counts(digit) < left {
                left -= counts(digit);
                digit -= 1;
            }
        });
        high = high << width | digit as u32;
    }
    (high, left)
}

/// Counts elements by a digit of their magnitude, of those whose digits above it are `high`.
fn with_counts(
    cpu: &Cpu,
    x: &[f32],
    high: u32,
    shift: u32,
    width: u32,
    look: impl FnOnce(&dyn Fn(usize) -> usize),
) {
    // Two tables for each thread, filled from its own run of elements.
    let run = x.len().div_ceil(cpu.team.size()).max(GRAIN_SIZE);
    let size = 1 << width;
    cpu.scratch[0].with_default(x.len().div_ceil(run) * 2 * size, |tables: &mut [u32]| {
        parallel_for(&cpu.team, x.len(), run, by_blocks(tables, 2 * size, run), |range, tables| {
            for (x, tables) in x[range].chunks(run).zip(tables.chunks_exact_mut(2 * size)) {
                match tables.as_chunks_mut::<FIRST>().0 {
                    [even, odd] if shift == DIGITS[0].0 => count_all(cpu.level, x, even, odd),
                    _ => count_some(cpu.level, x, high, shift, width, &mut tables[..size]),
                }
            }
        });
        look(&|digit| tables.iter().skip(digit).step_by(size).map(|&n| n as usize).sum());
    });
}

multiversion! {
    /// Each element by what is usual in its place, a step later.
    fn divide<I>(x: &[f32], squares: &mut [f32], ratios: &mut [f32]) {
        for ((x, square), ratio) in x.iter().zip(squares).zip(ratios) {
            *square = (*square * KEEP).max(LEAST);
            *ratio = x / (square.sqrt() + EPS);
        }
    }

    /// By the first digit. Neighbours are often alike: in two tables they do not wait for each other.
    fn count_all<I>(x: &[f32], even: &mut [u32; FIRST], odd: &mut [u32; FIRST]) {
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
        let (blocks, rest) = x.as_chunks::<LOOK>();
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

    /// Takes what is larger than `least`, and the first `equal` that are equal to it. How many that is.
    fn take<I>(x: &mut [f32], least: u32, equal: usize, pairs: &mut [u8]) -> usize {
        let whole = x.len() / LOOK * LOOK;
        let mut taken = Taken { pairs: pairs.as_chunks_mut().0, count: 0, least, equal };
        let (blocks, rest) = x.as_chunks_mut::<LOOK>();
        for (i, block) in blocks.iter_mut().enumerate() {
            let mut hits = 0;
            for x in block.iter() {
                hits |= (x.to_bits() & 0x7fff_ffff >= least) as u32;
            }
            if hits != 0 {
                taken.take(block, i * LOOK);
            }
        }
        taken.take(rest, whole);
        taken.count
    }
}

fn count_block(x: &[f32], high: u32, shift: u32, width: u32, counts: &mut [u32]) {
    for x in x {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        // Nobody can foresee which; adding nothing costs less than a wrong guess.
        let counted = magnitude >> (shift + width) == high;
        counts[(magnitude >> shift) as usize & (counts.len() - 1)] += counted as u32;
    }
}

/// What has been taken so far, and what may still be.
struct Taken<'a> {
    pairs: &'a mut [[u8; PAIR_BYTES]],
    count: usize,
    least: u32,
    /// Of those that are equal to `least`.
    equal: usize,
}

impl Taken<'_> {
    /// From at most `LOOK` elements at `first` and behind it.
    fn take(&mut self, x: &mut [f32], first: usize) {
        // Candidates are listed without a branch: nobody can foresee which they are.
        let (mut places, mut listed) = ([0u8; LOOK], 0);
        for (i, x) in x.iter().enumerate() {
            places[listed % LOOK] = i as u8;
            listed += (x.to_bits() & 0x7fff_ffff >= self.least) as usize;
        }
        for &i in &places[..listed] {
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
