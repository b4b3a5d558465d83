//! Duration of a matmul: tiles, waves of the units, and memory traffic.

use crate::cluster::{Accelerator, Matmul};

/// `count` matmuls of (m, k) by (k, n).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MatmulCall {
    /// (m, k, n).
    pub dims: [f64; 3],
    pub count: f64,
    /// Bytes per number.
    pub width: f64,
    /// Peak FLOP/s.
    pub rate: f64,
    /// Whether the result is accumulated into an f32 buffer: a weight gradient.
    pub sums: bool,
}

/// Seconds of the matmuls as one batched kernel.
pub fn matmul(device: &Accelerator, call: &MatmulCall) -> f64 {
    let MatmulCall { dims: [m, k, n], count, width, rate, sums } = *call;
    let shape = &device.matmul;
    let part = shape.overheads.map(|parts| if width > 2.0 { parts.f32 } else { parts.bf16 });
    let accumulate = part.map_or(shape.accumulate, |part| part.accumulate);
    let gain = part.map_or(1.0, |part| part.best)
        * if sums { accumulate } else { 1.0 }
        * curve(shape, (m * k * n).cbrt())
        * aligned(shape, [m, k, n], count);
    let computing = tiled(shape, [m, k, n], count, rate * gain);
    let moving = count * moved([m, k, n], width, sums) / device.stream_rate();
    if let Some(part) = part {
        let passing = part.passes.map_or(0.0, |share| moving / share);
        return computing + passing + count * part.start_us * 1e-6;
    }
    computing.max(moving).max(device.kernel_us * 1e-6)
}

/// Seconds of the matmuls of experts, or of their gradients. Each is a kernel, and a few kernels run concurrently, so
/// tiles fill the units for these together but not for all. Accumulation of results hardly overlaps with compute. The
/// model follows 60 such matmuls measured on a B200 (SimuMax).
pub fn grouped(device: &Accelerator, call: &MatmulCall) -> f64 {
    let MatmulCall { dims, count, width, rate, sums } = *call;
    let shape = &device.matmul;
    // On an accelerator, earlier kernels keep the units warm. On cores each matmul is as fast as in isolation.
    let warm = if shape.units > 1 { count } else { 1.0 };
    let gain = curve(shape, (dims.iter().product::<f64>() * warm).cbrt())
        * if sums { shape.accumulate } else { 1.0 };
    let concurrent = count.min(CONCURRENT_KERNELS);
    let computing = count / concurrent * tiled(shape, dims, concurrent, rate * gain);
    let moving = count * moved(dims, width, sums) / device.stream_rate();
    let seconds = match sums && shape.units > 1 {
        true => computing + EXPOSED_ACCUMULATION * moving,
        false => computing.max(moving),
    };
    seconds.max(device.kernel_us * 1e-6)
}

/// Expert kernels that run concurrently: the streams of Transformer Engine.
const CONCURRENT_KERNELS: f64 = 4.0;

/// Fraction of the memory traffic of accumulation that is not overlapped with compute.
const EXPOSED_ACCUMULATION: f64 = 0.7;

/// Seconds of compute, tile by tile.
fn tiled(shape: &Matmul, [m, k, n]: [f64; 3], count: f64, rate: f64) -> f64 {
    let unit = rate * shape.best / shape.units as f64;
    // A tile costs 2 · rows · columns · (k + ramp) FLOPs. The fastest tile size is used.
    let seconds = |&(rows, columns, reached): &(usize, usize, f64)| {
        let (rows, columns) = (rows as f64, columns as f64);
        let tiles = (m / rows).ceil() * (n / columns).ceil() * count;
        let rounds = (tiles / shape.units as f64).ceil();
        rounds * 2.0 * rows * columns * (k + shape.ramp) / (unit * reached)
    };
    shape.tiles.iter().map(seconds).fold(f64::INFINITY, f64::min)
}

/// Bytes of the matrices of one matmul.
fn moved([m, k, n]: [f64; 3], width: f64, sums: bool) -> f64 {
    let result = if sums { 8.0 } else { width };
    width * (m * k + k * n) + result * m * n
}

/// Relative speed with misaligned dimensions.
fn aligned(shape: &Matmul, dims: [f64; 3], count: f64) -> f64 {
    let multiple = |of: f64| dims.iter().all(|dim| dim % of == 0.0);
    match (multiple(64.0), multiple(8.0)) {
        (true, _) => 1.0,
        (_, true) => shape.misaligned[0],
        _ if count == 1.0 => shape.misaligned[1],
        _ => shape.misaligned[2],
    }
}

/// The measured curve at a size; 1 if there is none.
fn curve(shape: &Matmul, size: f64) -> f64 {
    let points = &shape.curve;
    let Some(after) = points.iter().position(|(at, _)| *at >= size) else {
        return points.last().map_or(1.0, |(_, reached)| *reached);
    };
    let Some(before) = after.checked_sub(1) else { return points[0].1 };
    let ((low, first), (high, second)) = (points[before], points[after]);
    first + (second - first) * (size / low).ln() / (high / low).ln()
}
