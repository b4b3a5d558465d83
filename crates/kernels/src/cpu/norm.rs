//! LayerNorm and RMSNorm over the rows of (rows, dim), forward and backward. The backward pass runs in one pass, or
//! separately for the input and for the parameters.

use super::Cpu;
use super::partition::{by_rows, grain_rows, parallel_for};
use super::reduce::over_rows;
use super::simd::{lane_sums, multiversion};
use crate::Float;

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

/// `stats` (rows, 2) receives the mean and 1 / standard deviation of each row, if needed.
pub fn layer_forward<E: Float>(
    cpu: &Cpu,
    x: &[E],
    gain: &[E],
    bias: &[E],
    eps: f32,
    out: &mut [E],
    stats: Option<&mut [f32]>,
) {
    forward::<E, Layer>(cpu, x, [gain, bias], eps, out, stats);
}

/// `stats` (rows) receives 1 / root mean square of each row, if needed.
pub fn rms_forward<E: Float>(
    cpu: &Cpu,
    x: &[E],
    gain: &[E],
    eps: f32,
    out: &mut [E],
    stats: Option<&mut [f32]>,
) {
    forward::<E, Rms>(cpu, x, [gain, &[]], eps, out, stats);
}

/// Recomputes the output from the saved statistics, bit for bit.
pub fn layer_recompute<E: Float>(
    cpu: &Cpu,
    x: &[E],
    gain: &[E],
    bias: &[E],
    stats: &[f32],
    out: &mut [E],
) {
    recompute::<E, Layer>(cpu, x, [gain, bias], stats, out);
}

/// Recomputes the output from the saved statistics, bit for bit.
pub fn rms_recompute<E: Float>(cpu: &Cpu, x: &[E], gain: &[E], stats: &[f32], out: &mut [E]) {
    recompute::<E, Rms>(cpu, x, [gain, &[]], stats, out);
}

/// Writes `dx`, or adds to it (`add`); writes `dgain` and `dbias`, or adds to them (`accumulate`).
pub fn layer_backward<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dx: &mut [E],
    add: bool,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Layer, 2>(cpu, from, dx, add, [dgain, dbias], accumulate);
}

/// Writes `dx`, or adds to it (`add`); writes `dgain`, or adds to it (`accumulate`).
pub fn rms_backward<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dx: &mut [E],
    add: bool,
    dgain: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Rms, 1>(cpu, from, dx, add, [dgain], accumulate);
}

/// Only `dx` of `layer_backward`, which the previous block waits for.
pub fn layer_backward_input<E: Float>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    backward_input::<E, Layer>(cpu, from, dx, add);
}

/// Only `dx` of `rms_backward`, which the previous block waits for.
pub fn rms_backward_input<E: Float>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    backward_input::<E, Rms>(cpu, from, dx, add);
}

/// Only `dgain` and `dbias` of `layer_backward`, which can be deferred; the same bits.
pub fn layer_backward_weight<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Layer, 2>(cpu, from, &mut [], false, [dgain, dbias], accumulate);
}

/// Only `dgain` of `rms_backward`, which can be deferred; the same bits.
pub fn rms_backward_weight<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dgain: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Rms, 1>(cpu, from, &mut [], false, [dgain], accumulate);
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

fn forward<E: Float, N: Norm>(
    cpu: &Cpu,
    x: &[E],
    [gain, bias]: [&[E]; 2],
    eps: f32,
    out: &mut [E],
    stats: Option<&mut [f32]>,
) {
    let dim = gain.len();
    let rows = rows::<E, N>(x, gain, &[out.len()], stats.as_ref().map(|stats| stats.len()));
    let width = if stats.is_some() { N::STATS } else { 0 };
    let outputs = (by_rows(out, dim), by_rows(stats.unwrap_or_default(), width));
    parallel_for(&cpu.team, rows, grain_rows(dim), outputs, |rows, (out, stats)| {
        forward_rows::<E, N>(
            cpu.level,
            &x[rows.start * dim..rows.end * dim],
            gain,
            bias,
            eps,
            out,
            stats,
        );
    });
}

fn recompute<E: Float, N: Norm>(
    cpu: &Cpu,
    x: &[E],
    [gain, bias]: [&[E]; 2],
    stats: &[f32],
    out: &mut [E],
) {
    let dim = gain.len();
    let rows = rows::<E, N>(x, gain, &[out.len()], Some(stats.len()));
    parallel_for(&cpu.team, rows, grain_rows(dim), by_rows(out, dim), |rows, out| {
        let (x, stats) = (&x[rows.start * dim..], &stats[rows.start * N::STATS..]);
        recompute_rows::<E, N>(cpu.level, x, gain, bias, stats, out);
    });
}

fn backward_input<E: Float, N: Norm>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    let dim = from.gain.len();
    let rows = rows::<E, N>(from.x, from.gain, &[from.dy.len(), dx.len()], Some(from.stats.len()));
    parallel_for(&cpu.team, rows, grain_rows(dim), by_rows(dx, dim), |rows, dx| {
        let from = slice_rows::<E, N>(from, rows);
        input_rows::<E, N>(cpu.level, from.x, from.gain, from.stats, from.dy, add, dx);
    });
}

/// `dx` is empty if only the parameter gradients are needed.
fn backward<E: Float, N: Norm, const P: usize>(
    cpu: &Cpu,
    from: &Backward<E>,
    dx: &mut [E],
    add: bool,
    parameters: [&mut [f32]; P],
    accumulate: bool,
) {
    let dim = from.gain.len();
    let rows = rows::<E, N>(from.x, from.gain, &[from.dy.len()], Some(from.stats.len()));
    assert!(
        parameters.iter().all(|gradient| gradient.len() == dim),
        "gradients of parameters have {dim} elements"
    );
    let width = if dx.is_empty() { 0 } else { dim };
    assert!(
        width == 0 || dx.len() == from.x.len(),
        "dx has {} of x's {} elements",
        dx.len(),
        from.x.len()
    );
    over_rows(cpu, rows, parameters, accumulate, by_rows(dx, width), |rows, parameters, dx| {
        let from = slice_rows::<E, N>(from, rows);
        let mut parameters = parameters.into_iter();
        let (dgain, dbias) =
            (parameters.next().unwrap_or_default(), parameters.next().unwrap_or_default());
        if dx.is_empty() {
            return weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
        }
        // Both gradients for a few rows at a time, while they are in cache.
        for (first, dx) in dx.chunks_mut(4 * BATCH * dim).enumerate() {
            let rows = first * 4 * BATCH..first * 4 * BATCH + dx.len() / dim;
            let from = slice_rows::<E, N>(&from, rows);
            weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
            input_rows::<E, N>(cpu.level, from.x, from.gain, from.stats, from.dy, add, dx);
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
        x: &[E], gain: &[E], bias: &[E], eps: f32, out: &mut [E], stats: &mut [f32],
    ) {
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

    fn recompute_rows<I, E: Float, N: Norm>(x: &[E], gain: &[E], bias: &[E], stats: &[f32], out: &mut [E]) {
        let dim = gain.len();
        for (row, (x, out)) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            write_row::<I, E, N>(x, (gain, bias), row_stats::<N>(stats, row), out);
        }
    }

    /// With h = (x - mean) rstd and g = dy gain: dx = rstd (g - mean(g) - h mean(g h)).
    fn input_rows<I, E: Float, N: Norm>(
        x: &[E], gain: &[E], stats: &[f32], dy: &[E], add: bool, dx: &mut [E],
    ) {
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
