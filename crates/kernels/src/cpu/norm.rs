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
        weight_rows::<E, N>(cpu.level, from.x, from.stats, from.dy, dgain, dbias);
        if !dx.is_empty() {
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
            out[j] = E::narrow(I::fma((x[j].wide() - mean) * rstd, gain[j].wide(), bias[j].wide()));
        }
    } else {
        for j in 0..dim {
            out[j] = E::narrow(x[j].wide() * rstd * gain[j].wide());
        }
    }
}

leveled! {
    fn forward_rows<I, E: Float, N: Norm>(
        x: &[E], gain: &[E], bias: &[E], eps: f32, out: &mut [E], stats: &mut [f32],
    ) {
        let dim = gain.len();
        for (row, (x, out)) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)).enumerate() {
            let mean = if N::CENTERED { lane_sums!((x in x) sum = sum + x) / dim as f32 } else { 0.0 };
            let squares = lane_sums!((x in x) sum = I::fma(x - mean, x - mean, sum));
            let rstd = 1.0 / (squares / dim as f32 + eps).sqrt();
            write_row::<I, E, N>(x, (gain, bias), (mean, rstd), out);
            if !stats.is_empty() {
                let kept = &mut stats[row * N::STATS..][..N::STATS];
                kept[0] = mean;
                kept[N::STATS - 1] = rstd;
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
        let rows = x.chunks_exact(dim).zip(dy.chunks_exact(dim)).zip(dx.chunks_exact_mut(dim));
        for (row, ((x, dy), dx)) in rows.enumerate() {
            let (mean, rstd) = kept::<N>(stats, row);
            let (direct, along) = lane_sums!((x in x, dy in dy, gain in gain)
                direct = I::fma(dy, gain, direct), along = I::fma(dy * gain, x - mean, along));
            // dx = g rstd - (x - mean) slope - shift
            let shift = if N::CENTERED { direct / dim as f32 * rstd } else { 0.0 };
            let slope = along / dim as f32 * rstd * rstd * rstd;
            let gain = &gain[..dim];
            if add {
                for j in 0..dim {
                    let own = I::fma(mean - x[j].wide(), slope, -shift);
                    let own = I::fma(dy[j].wide() * gain[j].wide(), rstd, own);
                    dx[j] = E::narrow(dx[j].wide() + own);
                }
            } else {
                for j in 0..dim {
                    let own = I::fma(mean - x[j].wide(), slope, -shift);
                    dx[j] = E::narrow(I::fma(dy[j].wide() * gain[j].wide(), rstd, own));
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
            if N::CENTERED {
                let dbias = &mut dbias[..dim];
                for j in 0..dim {
                    let dy = dy[j].wide();
                    dgain[j] = I::fma((x[j].wide() - mean) * rstd, dy, dgain[j]);
                    dbias[j] += dy;
                }
            } else {
                for j in 0..dim {
                    dgain[j] = I::fma(x[j].wide() * rstd, dy[j].wide(), dgain[j]);
                }
            }
        }
    }
}
