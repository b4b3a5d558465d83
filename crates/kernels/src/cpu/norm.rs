//! LayerNorm and RMSNorm over the rows of (rows, dim): each forward with its backward, and the backward in
//! one pass or in two halves, for the input and for the parameters.

use super::Cpu;
use super::cut::{cut, split, worth};
use super::reduce::over_rows;
use super::simd::{lane_sums, leveled};
use crate::Float;

/// What a backward reads.
pub struct Backward<'a, E> {
    pub x: &'a [E],       // (rows, dim)
    pub gain: &'a [E],    // (dim)
    pub stats: &'a [f32], // as the forward wrote them
    pub dy: &'a [E],      // (rows, dim)
}

/// Rows whose sums are under way at once: enough to hide the latency of adding up lanes, few enough to stay
/// in the first-level cache.
const BATCH: usize = 4;

/// Which of the two it is.
trait Norm {
    /// Numbers kept per row.
    const STATS: usize;
    /// Whether the mean is taken off, and a bias added.
    const CENTERED: bool;
}

/// `(x - mean) * rstd * gain + bias`; keeps (mean, rstd).
struct Layer;

/// `x * rstd * gain`; keeps rstd.
struct Rms;

impl Norm for Layer {
    const STATS: usize = 2;
    const CENTERED: bool = true;
}

impl Norm for Rms {
    const STATS: usize = 1;
    const CENTERED: bool = false;
}

/// `stats` (rows, 2) receives each row's mean and 1 / standard deviation, where they are wanted.
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

/// `stats` (rows) receives each row's 1 / root mean square, where they are wanted.
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

/// The forward's output once more, from the statistics that it left: the same bits.
pub fn layer_again<E: Float>(
    cpu: &Cpu,
    x: &[E],
    gain: &[E],
    bias: &[E],
    stats: &[f32],
    out: &mut [E],
) {
    again::<E, Layer>(cpu, x, [gain, bias], stats, out);
}

/// The forward's output once more, from the statistics that it left: the same bits.
pub fn rms_again<E: Float>(cpu: &Cpu, x: &[E], gain: &[E], stats: &[f32], out: &mut [E]) {
    again::<E, Rms>(cpu, x, [gain, &[]], stats, out);
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

/// The half of `layer_backward` that the block below waits for: only `dx`.
pub fn layer_backward_input<E: Float>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    backward_input::<E, Layer>(cpu, from, dx, add);
}

/// The half of `rms_backward` that the block below waits for: only `dx`.
pub fn rms_backward_input<E: Float>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    backward_input::<E, Rms>(cpu, from, dx, add);
}

/// The half of `layer_backward` that can wait: only `dgain` and `dbias`. The same bits as the whole gives.
pub fn layer_backward_weight<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dgain: &mut [f32],
    dbias: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Layer, 2>(cpu, from, &mut [], false, [dgain, dbias], accumulate);
}

/// The half of `rms_backward` that can wait: only `dgain`. The same bits as the whole gives.
pub fn rms_backward_weight<E: Float>(
    cpu: &Cpu,
    from: &Backward<E>,
    dgain: &mut [f32],
    accumulate: bool,
) {
    backward::<E, Rms, 1>(cpu, from, &mut [], false, [dgain], accumulate);
}

/// Rows of `x`, after the shapes are found to agree.
fn rows<E, N: Norm>(x: &[E], gain: &[E], others: &[usize], stats: Option<usize>) -> usize {
    let dim = gain.len();
    assert!(dim > 0 && x.len().is_multiple_of(dim), "{} elements are no rows of {dim}", x.len());
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
    let outputs = (cut(out, dim), cut(stats.unwrap_or_default(), width));
    split(&cpu.team, rows, worth(dim), outputs, |rows, (out, stats)| {
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

fn again<E: Float, N: Norm>(
    cpu: &Cpu,
    x: &[E],
    [gain, bias]: [&[E]; 2],
    stats: &[f32],
    out: &mut [E],
) {
    let dim = gain.len();
    let rows = rows::<E, N>(x, gain, &[out.len()], Some(stats.len()));
    split(&cpu.team, rows, worth(dim), cut(out, dim), |rows, out| {
        let (x, stats) = (&x[rows.start * dim..], &stats[rows.start * N::STATS..]);
        again_rows::<E, N>(cpu.level, x, gain, bias, stats, out);
    });
}

fn backward_input<E: Float, N: Norm>(cpu: &Cpu, from: &Backward<E>, dx: &mut [E], add: bool) {
    let dim = from.gain.len();
    let rows = rows::<E, N>(from.x, from.gain, &[from.dy.len(), dx.len()], Some(from.stats.len()));
    split(&cpu.team, rows, worth(dim), cut(dx, dim), |rows, dx| {
        let from = share::<E, N>(from, rows);
        input_rows::<E, N>(cpu.level, from.x, from.gain, from.stats, from.dy, add, dx);
    });
}

/// An empty `dx` is not wanted.
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
    assert!(parameters.iter().all(|gradient| gradient.len() == dim), "parameters of {dim}");
    let width = if dx.is_empty() { 0 } else { dim };
    assert!(
        width == 0 || dx.len() == from.x.len(),
        "dx has {} of x's {} elements",
        dx.len(),
        from.x.len()
    );
    over_rows(cpu, rows, parameters, accumulate, cut(dx, width), |rows, parameters, dx| {
        let from = share::<E, N>(from, rows);
        let mut parameters = parameters.into_iter();
        let (dgain, dbias) =
            (parameters.next().unwrap_or_default(), parameters.next().unwrap_or_default());
        if dx.is_empty() {
            return weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
        }
        // A few rows at a time for both, while they are in the cache.
        for (first, dx) in dx.chunks_mut(4 * BATCH * dim).enumerate() {
            let rows = first * 4 * BATCH..first * 4 * BATCH + dx.len() / dim;
            let from = share::<E, N>(&from, rows);
            weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
            input_rows::<E, N>(cpu.level, from.x, from.gain, from.stats, from.dy, add, dx);
        }
    });
}

/// A member's rows of all that is read.
fn share<'a, E, N: Norm>(from: &Backward<'a, E>, rows: std::ops::Range<usize>) -> Backward<'a, E> {
    let elements = rows.start * from.gain.len()..rows.end * from.gain.len();
    Backward {
        x: &from.x[elements.clone()],
        gain: from.gain,
        stats: &from.stats[rows.start * N::STATS..rows.end * N::STATS],
        dy: &from.dy[elements],
    }
}

/// A row's (mean, rstd), from what is kept.
#[inline(always)]
fn kept<N: Norm>(stats: &[f32], row: usize) -> (f32, f32) {
    if N::CENTERED { (stats[row * 2], stats[row * 2 + 1]) } else { (0.0, stats[row]) }
}

/// One row of the output.
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

leveled! {
    fn forward_rows<I, E: Float, N: Norm>(
        x: &[E], gain: &[E], bias: &[E], eps: f32, out: &mut [E], stats: &mut [f32],
    ) {
        let dim = gain.len();
        let (per_element, batch) = (1.0 / dim as f32, BATCH * dim);
        for (first, (x, out)) in x.chunks(batch).zip(out.chunks_mut(batch)).enumerate() {
            // Each step for all rows of a batch: a row's sums wait for each other, those of others need not.
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
                    let kept = &mut stats[(first * BATCH + row) * N::STATS..][..N::STATS];
                    kept[0] = mean;
                    kept[N::STATS - 1] = rstd;
                }
            }
        }
    }

    fn again_rows<I, E: Float, N: Norm>(x: &[E], gain: &[E], bias: &[E], stats: &[f32], out: &mut [E]) {
        let dim = gain.len();
        for (row, (x, out)) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            write_row::<I, E, N>(x, (gain, bias), kept::<N>(stats, row), out);
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
                let (mean, rstd) = kept::<N>(stats, row);
                let (direct, along) = lane_sums!(I, (x in x, dy in dy, gain in gain)
                    direct = I::fma(dy, gain, direct), along = I::fma(dy * gain, x - mean, along));
                shifts[row % BATCH] = if N::CENTERED { direct * per_element * rstd } else { 0.0 };
                slopes[row % BATCH] = along * per_element * rstd * rstd * rstd;
            }
            let rows = x.chunks_exact(dim).zip(dy.chunks_exact(dim)).zip(dx.chunks_exact_mut(dim));
            for (row, ((x, dy), dx)) in rows.enumerate() {
                let (mean, rstd) = kept::<N>(stats, row);
                let (slope, shift) = (slopes[row % BATCH], shifts[row % BATCH]);
                // All of one length, in plain sight: else each element is checked, and the last ones walk.
                let (x, dy, gain, dx) = (&x[..dim], &dy[..dim], &gain[..dim], &mut dx[..dim]);
                if add {
                    for j in 0..dim {
                        let own = I::fma(mean - x[j].as_f32(), slope, -shift);
                        let own = I::fma(dy[j].as_f32() * gain[j].as_f32(), rstd, own);
                        dx[j] = E::round_from(dx[j].as_f32() + own);
                    }
                } else {
                    for j in 0..dim {
                        let own = I::fma(mean - x[j].as_f32(), slope, -shift);
                        dx[j] = E::round_from(I::fma(dy[j].as_f32() * gain[j].as_f32(), rstd, own));
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
            let (mean, rstd) = kept::<N>(stats, row);
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
