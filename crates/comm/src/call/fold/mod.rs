//! Element-wise reduction of the contributions of several ranks.
//! Works on raw memory, because a source may be a peer's buffer; knows nothing about peers.

mod number;

use half::{bf16, f16};
use lockstep_types::Dtype;
use number::{Add, Arithmetic, Binary, Greatest, Job, Least, Number, Times};

/// Reduction operator. Integers wrap around; `Mean` of integers truncates; a NaN in any contribution
/// of `Min` or `Max` gives NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Op {
    Sum = 1,
    Mean,
    Min,
    Max,
    Product,
}

impl Op {
    pub const ALL: [Op; 5] = [Op::Sum, Op::Mean, Op::Min, Op::Max, Op::Product];

    pub fn name(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Mean => "mean",
            Op::Min => "min",
            Op::Max => "max",
            Op::Product => "product",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Op> {
        Op::ALL.into_iter().find(|o| *o as u8 == code)
    }
}

/// A reduction of one element type over `ranks` contributions.
#[derive(Clone, Copy, Debug)]
pub struct Fold {
    pub dtype: Dtype,
    pub op: Op,
    /// Number of contributions, for `Mean`.
    pub ranks: usize,
}

/// Elements combined at a time, so that the accumulator of a block stays in L1.
const BLOCK: usize = 512;

impl Fold {
    /// `acc = acc ∘ src`, without the final division of a mean.
    pub fn fold_into(&self, acc: &mut [u8], src: &[u8]) {
        assert_eq!(acc.len(), src.len(), "the lengths must be equal");
        let to = acc.as_mut_ptr();
        // SAFETY: both slices are live and of this length, and `acc` is ours alone.
        unsafe { self.combine(&[to, src.as_ptr()], &[to], acc.len(), false) }
    }

    /// Divides a mean by the number of contributions; does nothing for other operators.
    pub fn finish(&self, acc: &mut [u8]) {
        if self.op == Op::Mean && self.ranks > 1 {
            let to = acc.as_mut_ptr();
            // SAFETY: one live slice, ours alone, as the only source and the only destination.
            unsafe { self.combine(&[to], &[to], acc.len(), true) }
        }
    }

    /// Combines `sources` in order and writes the result to each of `destinations`. `last` means that all
    /// contributions are included, so that a mean is divided.
    ///
    /// # Safety
    /// Every pointer must be valid for `bytes` bytes and aligned for the element type; during the call,
    /// nobody else may write the sources or access the destinations. A destination may be a source, but
    /// two different pointers must not overlap.
    pub unsafe fn combine(
        &self,
        sources: &[*const u8],
        destinations: &[*mut u8],
        bytes: usize,
        last: bool,
    ) {
        let divisor = if last && self.op == Op::Mean { self.ranks } else { 1 };
        let job = Job { sources, destinations, bytes, divisor };
        // SAFETY: guaranteed by the caller; the types match `dtype`.
        unsafe {
            match self.dtype {
                Dtype::F32 => job.dispatch::<f32>(self.op),
                Dtype::F64 => job.dispatch::<f64>(self.op),
                Dtype::F16 => job.dispatch::<f16>(self.op),
                Dtype::Bf16 => job.dispatch::<bf16>(self.op),
                Dtype::I32 => job.dispatch::<i32>(self.op),
                Dtype::I64 => job.dispatch::<i64>(self.op),
                Dtype::U8 => job.dispatch::<u8>(self.op),
                Dtype::U32 => job.dispatch::<u32>(self.op),
            }
        }
    }
}

impl Job<'_> {
    /// Only sums are compiled for every vector width: gradients and activations are summed, while the
    /// other operators reduce a few numbers and would dominate the compile time of this crate.
    unsafe fn dispatch<T: Number>(&self, op: Op) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match op {
                Op::Sum | Op::Mean => self.widest::<T, Add>(),
                Op::Min => self.run::<T, Least>(),
                Op::Max => self.run::<T, Greatest>(),
                Op::Product => self.run::<T, Times>(),
            }
        }
    }

    /// Runs the loop that is compiled for the widest vectors of this processor.
    unsafe fn widest<T: Number, O: Binary>(&self) {
        // SAFETY: the feature is checked right before the call that needs it.
        unsafe {
            #[cfg(target_arch = "x86_64")]
            {
                if std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                {
                    return self.avx512::<T, O>();
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    return self.avx2::<T, O>();
                }
            }
            self.run::<T, O>()
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
    unsafe fn avx512<T: Number, O: Binary>(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run::<T, O>() }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2<T: Number, O: Binary>(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.run::<T, O>() }
    }

    #[inline(always)]
    unsafe fn run<T: Number, O: Binary>(&self) {
        let count = self.bytes / size_of::<T>();
        // SAFETY: guaranteed by the caller.
        if self.sources.len() == 2 && unsafe { T::pair::<O>(self, count) } {
            return;
        }
        let mut acc = [T::Acc::default(); BLOCK];
        let mut other = [T::Acc::default(); BLOCK];
        let mut start = 0;
        while start < count {
            let n = BLOCK.min(count - start);
            // SAFETY: the caller guarantees that `start + n` elements are inside every buffer. Each slice
            // is dropped before the next one over the same memory is created.
            unsafe {
                let source = |i: usize| {
                    std::slice::from_raw_parts(self.sources[i].cast::<T>().add(start), n)
                };
                T::widen(source(0), &mut acc[..n]);
                for i in 1..self.sources.len() {
                    T::absorb::<O>(&mut acc[..n], source(i), &mut other[..n]);
                }
                if self.divisor > 1 {
                    for a in &mut acc[..n] {
                        *a = a.over(self.divisor);
                    }
                }
                for &to in self.destinations {
                    let to = std::slice::from_raw_parts_mut(to.cast::<T>().add(start), n);
                    T::narrow(&acc[..n], to);
                }
            }
            start += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_types::{Element, bytes_of, bytes_of_mut};

    fn fold<T: Element>(op: Op, a: &[T], b: &[T]) -> Vec<T> {
        let mut acc = a.to_vec();
        let fold = Fold { dtype: T::DTYPE, op, ranks: 2 };
        fold.fold_into(bytes_of_mut(&mut acc), bytes_of(b));
        fold.finish(bytes_of_mut(&mut acc));
        acc
    }

    #[test]
    fn all_operators_on_plain_numbers() {
        assert_eq!(fold(Op::Sum, &[1i32, -5], &[2, 3]), [3, -2]);
        assert_eq!(fold(Op::Mean, &[1.0f32, 4.0], &[2.0, 8.0]), [1.5, 6.0]);
        assert_eq!(fold(Op::Min, &[1i64, 9], &[2, 3]), [1, 3]);
        assert_eq!(fold(Op::Max, &[1.0f64, 9.0], &[2.0, 3.0]), [2.0, 9.0]);
        assert_eq!(fold(Op::Product, &[3u8, 200], &[2, 2]), [6, 144]);
    }

    #[test]
    fn min_and_max_propagate_nan() {
        for op in [Op::Min, Op::Max] {
            assert!(fold(op, &[f32::NAN], &[1.0])[0].is_nan());
            assert!(fold(op, &[1.0], &[f32::NAN])[0].is_nan());
        }
    }

    #[test]
    fn half_precision_is_summed_in_f32_and_rounded_once() {
        let one = bf16::from_f32(1.0);
        let tiny = bf16::from_f32(1.0 / 256.0);
        // Each small addend alone would be rounded away; their sum is not.
        let fold = Fold { dtype: Dtype::Bf16, op: Op::Sum, ranks: 3 };
        let mut out = [bf16::default()];
        let (a, b, c) = ([one], [tiny], [tiny]);
        // SAFETY: live arrays of one element each.
        unsafe {
            fold.combine(
                &[a.as_ptr().cast(), b.as_ptr().cast(), c.as_ptr().cast()],
                &[out.as_mut_ptr().cast()],
                2,
                true,
            );
        }
        assert_eq!(out[0].to_f32(), 1.0 + 1.0 / 128.0);
    }

    /// Two sources into every subset of destinations: either source, both, and up to two others.
    #[test]
    fn two_sources_into_all_subsets_of_destinations() {
        for choice in 1..16u32 {
            let mut memory = [[1.5f32, -2.0, 7.0], [0.25, 4.0, -8.0], [0.0; 3], [0.0; 3]];
            let before = memory;
            let at: Vec<*mut u8> = memory.iter_mut().map(|m| m.as_mut_ptr().cast()).collect();
            let to: Vec<*mut u8> = (0..4).filter(|i| choice >> i & 1 == 1).map(|i| at[i]).collect();
            let mean = Fold { dtype: Dtype::F32, op: Op::Mean, ranks: 2 };
            // SAFETY: live arrays of twelve bytes.
            unsafe { mean.combine(&[at[0], at[1]], &to, 12, true) };
            for i in 0..4 {
                let want = if choice >> i & 1 == 1 { [0.875, 1.0, -0.5] } else { before[i] };
                assert_eq!(memory[i], want, "buffer {i}, destinations {choice:04b}");
            }
        }
    }

    #[test]
    fn all_lengths_around_the_block_size() {
        for n in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7] {
            let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
            let b: Vec<f32> = (0..n).map(|i| 2.0 * i as f32).collect();
            let want: Vec<f32> = (0..n).map(|i| 3.0 * i as f32).collect();
            assert_eq!(fold(Op::Sum, &a, &b), want, "length {n}");
        }
    }
}
