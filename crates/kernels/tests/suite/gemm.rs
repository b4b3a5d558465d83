//! Matrix multiplication against the reference: all levels, transposes, dtypes and epilogues, and many shapes.

use half::bf16;
use lockstep_kernels::cpu::gemm::{self, Data, DataMut, Epilogue, Gemm, Matrix};
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::{Dtype, Float, reference};
use proptest::prelude::*;

/// Parameters of one multiplication.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    m: usize,
    n: usize,
    k: usize,
    a: Side,
    b: Side,
    out: Dtype,
    /// Padding between rows, in elements, in all three matrices.
    gap: usize,
    accumulate: bool,
    scale: f32,
    bias: Option<Dtype>,
    gelu: Option<Dtype>,
    residual: Option<Dtype>,
}

#[derive(Clone, Copy, Debug)]
pub struct Side {
    dtype: Dtype,
    transposed: bool,
}

/// y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x.
pub const NT: (bool, bool) = (false, true);
const NN: (bool, bool) = (false, false);
const TN: (bool, bool) = (true, false);
const TT: (bool, bool) = (true, true);

pub fn case(m: usize, n: usize, k: usize, dtype: Dtype, (a, b): (bool, bool)) -> Case {
    let side = |transposed| Side { dtype, transposed };
    Case {
        m,
        n,
        k,
        a: side(a),
        b: side(b),
        out: Dtype::F32,
        gap: 0,
        accumulate: false,
        scale: 1.0,
        bias: None,
        gelu: None,
        residual: None,
    }
}

/// Owned elements of either dtype.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Values {
    /// Pseudo-random numbers in -1..1 that depend only on `seed`.
    pub fn new(dtype: Dtype, len: usize, seed: u64) -> Values {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        match dtype {
            Dtype::F32 => Values::F32((0..len).map(|_| next()).collect()),
            Dtype::Bf16 => Values::Bf16((0..len).map(|_| bf16::round_from(next())).collect()),
            dtype => unreachable!("matrices are f32 or bf16, not {dtype}"),
        }
    }

    fn data(&self) -> Data<'_> {
        match self {
            Values::F32(values) => Data::F32(values),
            Values::Bf16(values) => Data::Bf16(values),
        }
    }

    fn data_mut(&mut self) -> DataMut<'_> {
        match self {
            Values::F32(values) => DataMut::F32(values),
            Values::Bf16(values) => DataMut::Bf16(values),
        }
    }

    pub fn as_f32(&self) -> Vec<f32> {
        match self {
            Values::F32(values) => values.clone(),
            Values::Bf16(values) => values.iter().map(|value| value.as_f32()).collect(),
        }
    }

    /// Relative rounding error of a stored value.
    fn rounding(&self) -> f32 {
        match self {
            Values::F32(_) => 1e-6,
            Values::Bf16(_) => 1.0 / 128.0,
        }
    }
}

/// The output, and the values before GELU.
pub type Outcome = (Values, Option<Values>);

/// Runs a case with the given implementation.
pub fn outcome(case: &Case, multiply: impl FnOnce(Gemm<'_>)) -> Outcome {
    let Case { m, n, k, .. } = *case;
    let stored = |side: Side, rows, cols| if side.transposed { (cols, rows) } else { (rows, cols) };
    let matrix = |side: Side, rows, cols, seed| {
        let (rows, cols) = stored(side, rows, cols);
        Values::new(side.dtype, rows * (cols + case.gap), seed)
    };
    let (a, b) = (matrix(case.a, m, k, 1), matrix(case.b, k, n, 2));
    let view = |side: Side, values, rows, cols| Matrix {
        data: values,
        stride: stored(side, rows, cols).1 + case.gap,
        transposed: side.transposed,
    };
    let mut out = Values::new(case.out, m * (n + case.gap), 3);
    let bias = case.bias.map(|dtype| Values::new(dtype, n, 4));
    let residual = case.residual.map(|dtype| Values::new(dtype, m * n, 5));
    let mut before = case.gelu.map(|dtype| Values::new(dtype, m * n, 6));
    multiply(Gemm {
        m,
        n,
        k,
        a: view(case.a, a.data(), m, k),
        b: view(case.b, b.data(), k, n),
        out: out.data_mut(),
        out_stride: n + case.gap,
        accumulate: case.accumulate,
        scale: case.scale,
        epilogue: Epilogue {
            bias: bias.as_ref().map(Values::data),
            gelu: before.as_mut().map(Values::data_mut),
            residual: residual.as_ref().map(Values::data),
        },
    });
    (out, before)
}

fn close(case: &Case, level: Level, ours: &Values, want: &Values) {
    // f32 rounding of sums of k products below one, and of the epilogue.
    let sums = (1.0 + case.k as f32).sqrt() * 2e-6 * case.scale.abs().max(1.0);
    for (place, (x, y)) in ours.as_f32().into_iter().zip(want.as_f32()).enumerate() {
        let allowed = sums + want.rounding() * y.abs();
        assert!((x - y).abs() <= allowed, "{level:?} {case:?}: {x}, expected {y}, at {place}");
    }
}

/// Compares a case with the reference at every level, and one thread with three.
fn check(case: Case) {
    let (want, want_before) = outcome(&case, reference::gemm::run);
    for level in Level::of_this_machine().and_below() {
        let (out, before) = outcome(&case, |gemm| gemm::run(&Cpu::at(level, 1), gemm));
        close(&case, level, &out, &want);
        if let (Some(before), Some(want)) = (&before, &want_before) {
            close(&case, level, before, want);
        }
        let more = outcome(&case, |gemm| gemm::run(&Cpu::at(level, 3), gemm));
        assert!(
            more == (out, before),
            "{level:?} {case:?}: one and three threads give different bits"
        );
    }
}

pub const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

#[test]
fn shapes_around_tile_edges() {
    for (m, n, k) in [
        (1, 1, 1),
        (0, 5, 3),
        (5, 0, 3),
        (9, 33, 0),
        (3, 20, 0),
        (2, 100, 40),
        (7, 65, 33),
        (8, 64, 32),
        (9, 1, 17),
        (14, 32, 16),
        (15, 31, 31),
        (16, 48, 64),
        (31, 33, 47),
        (32, 32, 32),
        (33, 65, 96),
        (65, 130, 129),
    ] {
        for dtype in DTYPES {
            for order in [NT, NN, TN, TT] {
                check(case(m, n, k, dtype, order));
            }
        }
    }
}

#[test]
fn k_longer_than_a_panel() {
    for dtype in DTYPES {
        for order in [NT, NN, TN] {
            check(case(40, 70, 1030, dtype, order));
            check(case(33, 33, 2500, dtype, order));
            check(case(4, 70, 1500, dtype, order));
        }
    }
}

#[test]
fn outputs_larger_than_a_block() {
    for dtype in DTYPES {
        check(case(1100, 40, 1100, dtype, NT));
        check(case(20, 3000, 600, dtype, NN));
        check(case(40, 2100, 1040, dtype, TN));
    }
}

#[test]
fn all_pairs_of_dtypes() {
    for a in DTYPES {
        for b in DTYPES {
            for out in DTYPES {
                for order in [NT, NN, TN] {
                    for m in [5, 45] {
                        let mut case = case(m, 50, 70, a, order);
                        (case.b.dtype, case.out) = (b, out);
                        case.accumulate = m == 45;
                        check(case);
                    }
                }
            }
        }
    }
}

#[test]
fn all_epilogues() {
    let choices = [None, Some(Dtype::F32), Some(Dtype::Bf16)];
    for bias in choices {
        for gelu in choices {
            for residual in choices {
                for (accumulate, scale, k) in
                    [(false, 1.0, 64), (true, 0.5, 64), (false, -2.0, 1100)]
                {
                    for dtype in DTYPES {
                        let plain = case(37, 45, k, dtype, NT);
                        check(Case {
                            bias,
                            gelu,
                            residual,
                            accumulate,
                            scale,
                            out: dtype,
                            ..plain
                        });
                    }
                }
            }
        }
    }
}

/// The padding between the rows of a strided output is not written.
#[test]
fn padding_is_not_written() {
    for dtype in DTYPES {
        for (m, n) in [(6, 70), (50, 70)] {
            let case = Case { gap: 3, out: dtype, ..case(m, n, 64, dtype, NT) };
            let before = Values::new(dtype, m * (n + 3), 3).as_f32();
            for level in Level::of_this_machine().and_below() {
                let (out, _) = outcome(&case, |gemm| gemm::run(&Cpu::at(level, 2), gemm));
                for (place, (x, y)) in out.as_f32().into_iter().zip(&before).enumerate() {
                    assert!(
                        place % (n + 3) < n || x == *y,
                        "{level:?}: padding at {place} was written"
                    );
                }
            }
        }
    }
}

/// NaN and infinity propagate, also when the other factor is zero.
#[test]
fn nan_and_infinity_propagate() {
    for level in Level::of_this_machine().and_below() {
        for dtype in DTYPES {
            for m in [1, 20] {
                let (mut a, b) = (vec![0.0f32; m * 40], vec![1.0f32; 40 * 24]);
                a[3] = f32::NAN;
                let narrow = |values: &[f32]| {
                    values.iter().map(|x| bf16::round_from(*x)).collect::<Vec<_>>()
                };
                let (a16, b16) = (narrow(&a), narrow(&b));
                let (a, b) = match dtype {
                    Dtype::F32 => (Data::F32(&a), Data::F32(&b)),
                    _ => (Data::Bf16(&a16), Data::Bf16(&b16)),
                };
                let mut out = vec![0.0f32; m * 24];
                gemm::run(
                    &Cpu::at(level, 1),
                    Gemm {
                        m,
                        n: 24,
                        k: 40,
                        a: Matrix { data: a, stride: 40, transposed: false },
                        b: Matrix { data: b, stride: 40, transposed: true },
                        out: DataMut::F32(&mut out),
                        out_stride: 24,
                        accumulate: false,
                        scale: 1.0,
                        epilogue: Epilogue::default(),
                    },
                );
                assert!(out[..24].iter().all(|x| x.is_nan()), "{level:?} {dtype} {m}");
                assert!(out[24..].iter().all(|x| *x == 0.0), "{level:?} {dtype} {m}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "a: (4, 6) with stride 6 needs 24 elements, not 23")]
fn a_short_slice_panics_with_its_sizes() {
    let (a, b, mut out) = (vec![0.0; 23], vec![0.0; 30], vec![0.0; 20]);
    let view = |values, stride| Matrix { data: Data::F32(values), stride, transposed: false };
    gemm::run(
        &Cpu::new(1),
        Gemm {
            m: 4,
            n: 5,
            k: 6,
            a: view(&a, 6),
            b: view(&b, 5),
            out: DataMut::F32(&mut out),
            out_stride: 5,
            accumulate: false,
            scale: 1.0,
            epilogue: Epilogue::default(),
        },
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_small_case(
        (m, n, k) in (0usize..70, 0usize..100, 0usize..140),
        (a, b, out) in (0usize..2, 0usize..2, 0usize..2),
        (a_transposed, b_transposed, accumulate) in any::<(bool, bool, bool)>(),
        (bias, gelu, residual) in (0usize..3, 0usize..3, 0usize..3),
        gap in 0usize..5,
        scale in -2.0f32..2.0,
    ) {
        let choices = [None, Some(Dtype::F32), Some(Dtype::Bf16)];
        check(Case {
            m, n, k, gap, accumulate, scale,
            a: Side { dtype: DTYPES[a], transposed: a_transposed },
            b: Side { dtype: DTYPES[b], transposed: b_transposed },
            out: DTYPES[out],
            bias: choices[bias],
            gelu: choices[gelu],
            residual: choices[residual],
        });
    }
}
