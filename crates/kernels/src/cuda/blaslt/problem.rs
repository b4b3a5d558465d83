//! A matrix product in the terms of cuBLASLt.
//!
//! cuBLASLt's matrices are column-major. A row-major (rows, cols) matrix is its own transpose there, so `out = a · b`
//! is computed as `outᵀ = bᵀ · aᵀ`: the operands change places, and nothing is moved.

use std::fmt;

use crate::{Dtype, Fp8Format};

/// Everything that the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Problem {
    /// Rows and columns of `out`, and the inner dimension.
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a_transposed: bool,
    pub b_transposed: bool,
    pub inputs: Inputs,
    pub output: Dtype,
    pub epilogue: EpilogueKind,
    /// `out = a · b + c`, with `c` either `out` itself or another matrix.
    pub addend: Addend,
    /// Alignment of `a`, `b`, `c` and `out`, in bytes, up to 256.
    pub alignment: [u16; 4],
    pub tf32: bool,
}

/// Types of `a` and `b`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Inputs {
    Of(Dtype),
    /// With scales, and with or without fast accumulation.
    Fp8 {
        a: Fp8Format,
        b: Fp8Format,
        fast: bool,
    },
}

impl fmt::Display for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Inputs::Of(dtype) => write!(f, "{dtype}"),
            Inputs::Fp8 { a, b, fast } => {
                write!(f, "{a:?}*{b:?}{}", if *fast { "-fast" } else { "" })
            }
        }
    }
}

/// Operation on the product before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum EpilogueKind {
    None,
    Bias,
    /// GELU, with its input stored too.
    Gelu,
    BiasGelu,
    /// Times the derivative of GELU at a stored input.
    GeluBackward,
}

/// The matrix that is added to the product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Addend {
    None,
    Output,
    Other,
}

/// A short product has fewer multiply-adds.
const SHORT: usize = 1 << 23;

impl Problem {
    /// The problem with its sizes rounded up to an eighth of a power of two. All problems of a class use the algorithm that is
    /// selected for the first: the row counts of experts differ in every step, and selecting takes milliseconds.
    pub fn class(&self) -> Problem {
        let round = |size: usize| size.next_multiple_of((size.next_power_of_two() / 8).max(1));
        let Problem { m, n, k, .. } = *self;
        Problem { m: round(m), n: round(n), k: round(k), ..*self }
    }

    /// Whether every algorithm takes microseconds, so that the heuristic's first is used. Trials would take longer than they
    /// save: experts of a small model have many classes, because the alignment of their rows differs too.
    pub fn is_short(&self) -> bool {
        self.m * self.n * self.k < SHORT
    }

    /// One line that identifies the problem in the file of selected algorithms.
    pub fn text(&self) -> String {
        let Problem { m, n, k, inputs, output, epilogue, addend, alignment, .. } = self;
        let side = |transposed| if transposed { 't' } else { 'n' };
        let [a, b, c, d] = alignment;
        format!(
            "{m},{n},{k} {}{} {inputs} {output} {epilogue:?} {addend:?} {a},{b},{c},{d}{}",
            side(self.a_transposed),
            side(self.b_transposed),
            if self.tf32 { " tf32" } else { "" }
        )
    }
}

/// The largest power of two up to 256 that divides an address.
pub(crate) fn alignment(address: u64) -> u16 {
    1 << address.trailing_zeros().min(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_contains_sizes_that_differ_little() {
        let problem = |m| Problem {
            m,
            n: 768,
            k: 50_257,
            a_transposed: false,
            b_transposed: true,
            inputs: Inputs::Of(Dtype::Bf16),
            output: Dtype::Bf16,
            epilogue: EpilogueKind::None,
            addend: Addend::None,
            alignment: [256; 4],
            tf32: false,
        };
        for m in (1..5000).step_by(7) {
            let class = problem(m).class();
            assert!(class.m >= m && class.m - m <= m / 4, "{m} in {class:?}");
            assert_eq!(class, class.class());
        }
        assert_eq!(problem(4000).class(), problem(4096).class());
        assert_ne!(problem(3500).class(), problem(4096).class());
    }

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        assert_eq!([0, 1, 2, 6, 16, 768, 4096].map(alignment), [256, 1, 2, 2, 16, 256, 256]);
    }
}
