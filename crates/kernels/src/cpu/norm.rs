//! LayerNorm and RMSNorm over the rows of (rows, dim), forward and backward.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::reduce::{Sums, over_rows};
use super::simd::{lane_sums, multiversion};
use crate::Float;

/// Parameters of a norm.
#[derive(Clone, Copy)]
pub struct Params<'a, E> {
    pub gain: &'a [E], // (dim)
    /// LayerNorm if given, RMSNorm otherwise.
    pub bias: Option<&'a [E]>, // (dim)
    /// Added to the variance in the forward pass.
    pub eps: f32,
}

/// Gradients of the parameters.
pub struct Gradients<'a> {
    pub gain: &'a mut [f32], // (dim)
    /// For LayerNorm only.
    pub bias: Option<&'a mut [f32]>, // (dim)
    /// Add to the gradients instead of overwriting them.
    pub accumulate: bool,
}

/// Inputs of a backward pass.
pub struct Backward<'a, E> {
    pub x: &'a [E],       // (rows, dim)
    pub gain: &'a [E],    // (dim)
    pub stats: &'a [f32], // as written by the forward pass
    pub dy: &'a [E],      // (rows, dim)
}

/// Rows whose sums are computed together: enough to hide the latency of summing lanes, few enough to stay in L1.
const BATCH: usize = 4;

/// LayerNorm or RMSNorm.
trait Norm {
    /// Saved statistics per row.
    const STATS: usize;
    /// Whether the mean is subtracted and a bias added.
    const CENTERED: bool;
}

/// `(x - mean) * rstd * gain + bias`; saves (mean, rstd).
struct Layer;

/// `x * rstd * gain`; saves rstd.
struct Rms;

impl Norm for Layer {
    const STATS: usize = 2;
    const CENTERED: bool = true;
}

impl Norm for Rms {
    const STATS: usize = 1;
    const CENTERED: bool = false;
}

/// Normalizes each row of `x`. `stats` receives mean and 1 / standard deviation of each row (LayerNorm, (rows, 2)), or
/// 1 / root mean square (RMSNorm, (rows)), if needed.
pub fn forward<E: Float>(
    cpu: &Cpu,
    params: Params<'_, E>,
    x: &[E],
    out: &mut [E],
    stats: Option<&mut [f32]>,
) {
    match params.bias {
        Some(_) => forward_as::<E, Layer>(cpu, params, x, out, stats),
        None => forward_as::<E, Rms>(cpu, params, x, out, stats),
    }
}

/// Recomputes the output from the saved statistics, bit for bit.
pub fn recompute<E: Float>(
    cpu: &Cpu,
    params: Params<'_, E>,
    x: &[E],
    stats: &[f32],
    out: &mut [E],
) {
    match params.bias {
        Some(_) => recompute_as::<E, Layer>(cpu, params, x, stats, out),
        None => recompute_as::<E, Rms>(cpu, params, x, stats, out),
    }
}

/// Writes `dx`, or adds to it (`add`), and computes the gradients of the parameters.
pub fn backward<E: Float>(
    cpu: &Cpu,
    from: &Backward<'_, E>,
    dx: &mut [E],
    add: bool,
    gradients: Gradients<'_>,
) {
    let Gradients { gain, bias, accumulate } = gradients;
    match bias {
        Some(bias) => {
            backward_as::<E, Layer, 2>(cpu, from, dx, add, Sums { out: [gain, bias], accumulate })
        }
        None => backward_as::<E, Rms, 1>(cpu, from, dx, add, Sums { out: [gain], accumulate }),
    }
}

/// Checks the shapes and returns the number of rows.
fn rows<E, N: Norm>(x: &[E], gain: &[E], others: &[usize], stats: Option<usize>) -> usize {
    let dim = gain.len();
    assert!(
        dim > 0 && x.len().is_multiple_of(dim),
        "{} elements are not a multiple of dim={dim}",
        x.len()
    );
    let rows = x.len() / dim;
    assert!(
        others.iter().all(|&len| len == x.len()),
        "x has {} elements, the others {others:?}",
        x.len()
    );
    if let Some(stats) = stats {
        assert_eq!(stats, rows * N::STATS, "statistics of {rows} rows");
    }
    rows
}

fn forward_as<E: Float, N: Norm>(
    cpu: &Cpu,
    params: Params<'_, E>,
    x: &[E],
    out: &mut [E],
    stats: Option<&mut [f32]>,
) {
    let dim = params.gain.len();
    let rows = rows::<E, N>(x, params.gain, &[out.len()], stats.as_ref().map(|stats| stats.len()));
    let width = if stats.is_some() { N::STATS } else { 0 };
    let outputs = (by_rows(out, dim), by_rows(stats.unwrap_or_default(), width));
    parallel_for(&cpu.team, rows, grain_rows(dim), outputs, |rows, (out, stats)| {
        forward_rows::<E, N>(cpu.level, &x[rows.start * dim..rows.end * dim], params, out, stats);
    });
}

fn recompute_as<E: Float, N: Norm>(
    cpu: &Cpu,
    params: Params<'_, E>,
    x: &[E],
    stats: &[f32],
    out: &mut [E],
) {
    let dim = params.gain.len();
    let rows = rows::<E, N>(x, params.gain, &[out.len()], Some(stats.len()));
    parallel_for(&cpu.team, rows, grain_rows(dim), by_rows(out, dim), |rows, out| {
        let (x, stats) = (&x[rows.start * dim..], &stats[rows.start * N::STATS..]);
        recompute_rows::<E, N>(cpu.level, x, params, stats, out);
    });
}

fn backward_as<E: Float, N: Norm, const P: usize>(
    cpu: &Cpu,
    from: &Backward<'_, E>,
    dx: &mut [E],
    add: bool,
    parameters: Sums<'_, P>,
) {
    let dim = from.gain.len();
    let rows = rows::<E, N>(from.x, from.gain, &[from.dy.len(), dx.len()], Some(from.stats.len()));
    assert!(
        parameters.out.iter().all(|gradient| gradient.len() == dim),
        "gradients of parameters have {dim} elements"
    );
    over_rows(cpu, rows, parameters, by_rows(dx, dim), |rows, parameters, dx| {
        let from = slice_rows::<E, N>(from, rows);
        let mut parameters = parameters.into_iter();
        let (dgain, dbias) =
            (parameters.next().unwrap_or_default(), parameters.next().unwrap_or_default());
        // Both gradients for a few rows at a time, while they are in cache.
        for (first, dx) in dx.chunks_mut(4 * BATCH * dim).enumerate() {
            let rows = first * 4 * BATCH..first * 4 * BATCH + dx.len() / dim;
            let from = slice_rows::<E, N>(&from, rows);
            weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
            input_rows::<E, N>(cpu.level, &from, add, dx);
        }
    });
}

/// The inputs of some rows.
fn slice_rows<'a, E, N: Norm>(
    from: &Backward<'a, E>,
    rows: std::ops::Range<usize>,
) -> Backward<'a, E> {
    let elements = rows.start * from.gain.len()..rows.end * from.gain.len();
    Backward {
        x: &from.x[elements.clone()],
        gain: from.gain,
        stats: &from.stats[rows.start * N::STATS..rows.end * N::STATS],
        dy: &from.dy[elements],
    }
}

/// The saved (mean, rstd) of a row.
#[inline(always)]
fn row_stats<N: Norm>(stats: &[f32], row: usize) -> (f32, f32) {
    if N::CENTERED { (stats[row * 2], stats[row * 2 + 1]) } else { (0.0, stats[row]) }
}

/// Writes one row of the output.
#[inline(always)]
fn write_row<I: super::simd::Isa, E: Float, N: Norm>(
    x: &[E],
    (gain, bias): (&[E], &[E]),
    (mean, rstd): (f32, f32),
    out: &mut [E],
) {
    let dim = out.len();
    let (x, gain) = (&x[..dim], &gain[..dim]);
    if N::CENTERED {
        let bias = &bias[..dim];
        for j in 0..dim {
            out[j] = E::round_from(I::fma(
                (x[j].as_f32() - mean) * rstd,
                gain[j].as_f32(),
                bias[j].as_f32(),
            ));
        }
    } else {
        for j in 0..dim {
            out[j] = E::round_from(x[j].as_f32() * rstd * gain[j].as_f32());
        }
    }
}

multiversion! {
    fn forward_rows<I, E: Float, N: Norm>(
        x: &[E], params: Params<'_, E>, out: &mut [E], stats: &mut [f32],
    ) {
        let (gain, bias, eps) = (params.gain, params.bias.unwrap_or_default(), params.eps);
        let dim = gain.len();
        let (per_element, batch) = (1.0 / dim as f32, BATCH * dim);
        for (first, (x, out)) in x.chunks(batch).zip(out.chunks_mut(batch)).enumerate() {
            // Each step runs for all rows of a batch: the sums of different rows are independent.
            let (mut means, mut rstds) = ([0f32; BATCH], [0f32; BATCH]);
            if N::CENTERED {
                for (row, x) in x.chunks_exact(dim).enumerate() {
                    means[row % BATCH] = lane_sums!(I, (x in x) sum = sum + x) * per_element;
                }
            }
            for (row, x) in x.chunks_exact(dim).enumerate() {
                let mean = means[row % BATCH];
                rstds[row % BATCH] = lane_sums!(I, (x in x) sum = I::fma(x - mean, x - mean, sum));
            }
            for squares in &mut rstds {
                *squares = 1.0 / I::fma(*squares, per_element, eps).sqrt();
            }
            for (row, (x, out)) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
                let (mean, rstd) = (means[row % BATCH], rstds[row % BATCH]);
                write_row::<I, E, N>(x, (gain, bias), (mean, rstd), out);
                if !stats.is_empty() {
                    let saved = &mut stats[(first * BATCH + row) * N::STATS..][..N::STATS];
                    saved[0] = mean;
                    saved[N::STATS - 1] = rstd;
                }
            }
        }
    }

    fn recompute_rows<I, E: Float, N: Norm>(x: &[E], params: Params<'_, E>, stats: &[f32], out: &mut [E]) {
        let (gain, bias) = (params.gain, params.bias.unwrap_or_default());
        let dim = gain.len();
        for (row, (x, out)) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            write_row::<I, E, N>(x, (gain, bias), row_stats::<N>(stats, row), out);
        }
    }

    /// dx = rstd (g - mean(g) - h mean(g h)), where h = (x - mean) rstd and g = dy gain.
    fn input_rows<I, E: Float, N: Norm>(from: &Backward<'_, E>, add: bool, dx: &mut [E]) {
        let (x, gain, stats, dy) = (from.x, from.gain, from.stats, from.dy);
        let dim = gain.len();
        let (per_element, batch) = (1.0 / dim as f32, BATCH * dim);
        let batches = x.chunks(batch).zip(dy.chunks(batch)).zip(dx.chunks_mut(batch));
        for (first, ((x, dy), dx)) in batches.enumerate() {
            let stats = &stats[first * BATCH * N::STATS..];
            // dx = g rstd - (x - mean) slope - shift
            let (mut slopes, mut shifts) = ([0f32; BATCH], [0f32; BATCH]);
            for (row, (x, dy)) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)).enumerate() {
                let (mean, rstd) = row_stats::<N>(stats, row);
                let (direct, along) = lane_sums!(I, (x in x, dy in dy, gain in gain)
                    direct = I::fma(dy, gain, direct), along = I::fma(dy * gain, x - mean, along));
                shifts[row % BATCH] = if N::CENTERED { direct * per_element * rstd } else { 0.0 };
                slopes[row % BATCH] = along * per_element * rstd * rstd * rstd;
            }
            let rows = x.chunks_exact(dim).zip(dy.chunks_exact(dim)).zip(dx.chunks_exact_mut(dim));
            for (row, ((x, dy), dx)) in rows.enumerate() {
                let (mean, rstd) = row_stats::<N>(stats, row);
                let (slope, shift) = (slopes[row % BATCH], shifts[row % BATCH]);
                // Equal lengths, visible to the compiler: otherwise each element is bounds-checked and the tail is scalar.
                let (x, dy, gain, dx) = (&x[..dim], &dy[..dim], &gain[..dim], &mut dx[..dim]);
                if add {
                    for j in 0..dim {
                        let grad = I::fma(mean - x[j].as_f32(), slope, -shift);
                        let grad = I::fma(dy[j].as_f32() * gain[j].as_f32(), rstd, grad);
                        dx[j] = E::round_from(dx[j].as_f32() + grad);
                    }
                } else {
                    for j in 0..dim {
                        let grad = I::fma(mean - x[j].as_f32(), slope, -shift);
                        dx[j] = E::round_from(I::fma(dy[j].as_f32() * gain[j].as_f32(), rstd, grad));
                    }
                }
            }
        }
    }

    /// dgain += dy h, and dbias += dy.
    fn weight_rows<I, E: Float, N: Norm>(
        x: &[E], stats: &[f32], dy: &[E], dgain: &mut [f32], dbias: &mut [f32],
    ) {
        let dim = dgain.len();
        for (row, (x, dy)) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)).enumerate() {
            let (mean, rstd) = row_stats::<N>(stats, row);
            let (x, dy, dgain) = (&x[..dim], &dy[..dim], &mut dgain[..dim]);
            if N::CENTERED {
                let dbias = &mut dbias[..dim];
                for j in 0..dim {
                    let dy = dy[j].as_f32();
                    dgain[j] = I::fma((x[j].as_f32() - mean) * rstd, dy, dgain[j]);
                    dbias[j] += dy;
                }
            } else {
                for j in 0..dim {
                    dgain[j] = I::fma(x[j].as_f32() * rstd, dy[j].as_f32(), dgain[j]);
                }
            }
        }
    }
}
