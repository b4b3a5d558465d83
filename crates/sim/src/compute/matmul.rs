//! A matrix multiply in time: tiles, rounds of the units, and the memory that it touches.

use crate::cluster::{Accelerator, Matmul};

/// Seconds of `count` multiplies of (m, k) by (k, n) in numbers of `width` bytes, on a device that does `rate`
/// operations per second at best. `sums` says that the result is added to what is there in f32.
pub fn matmul(
    device: &Accelerator,
    [m, k, n]: [f64; 3],
    count: f64,
    width: f64,
    rate: f64,
    sums: bool,
) -> f64 {
    let shape = &device.matmul;
    let part = shape.overheads.map(|parts| if width > 2.0 { parts.f32 } else { parts.bf16 });
    let accumulate = part.map_or(shape.accumulate, |part| part.accumulate);
    let gain = if sums { accumulate } else { 1.0 }
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

/// Seconds of `count` multiplies of experts, each with `m` rows, or of their gradients. Every one is a kernel of its
/// own, of which a few go on side by side: tiles fill the units for these together, not for all. Where results are
/// added to what is there, the adding hardly hides behind the computing. So 60 such multiplies were measured
/// on a B200 (SimuMax).
pub fn grouped(
    device: &Accelerator,
    dims: [f64; 3],
    count: f64,
    width: f64,
    rate: f64,
    sums: bool,
) -> f64 {
    let shape = &device.matmul;
    // Many units are warm from the multiplies before; cores are as fast as each by itself.
    let warm = if shape.units > 1 { count } else { 1.0 };
    let gain = curve(shape, (dims.iter().product::<f64>() * warm).cbrt())
        * if sums { shape.accumulate } else { 1.0 };
    let beside = count.min(BESIDE);
    let computing = count / beside * tiled(shape, dims, beside, rate * gain);
    let moving = count * moved(dims, width, sums) / device.stream_rate();
    let seconds = match sums && shape.units > 1 {
        true => computing + ADDING * moving,
        false => computing.max(moving),
    };
    seconds.max(device.kernel_us * 1e-6)
}

/// Kernels of experts that go on side by side: streams of Transformer Engine.
const BESIDE: f64 = 4.0;

/// Of moving sums in and out, what nothing hides.
const ADDING: f64 = 0.7;

/// Seconds of computing so many multiplies tile by tile.
fn tiled(shape: &Matmul, [m, k, n]: [f64; 3], count: f64, rate: f64) -> f64 {
    let unit = rate * shape.best / shape.units as f64;
    // A unit takes (k + ramp) · 2 · rows · columns operations' time for a tile; of the ways to cut, the fastest.
    let seconds = |&(rows, columns, reached): &(usize, usize, f64)| {
        let (rows, columns) = (rows as f64, columns as f64);
        let tiles = (m / rows).ceil() * (n / columns).ceil() * count;
        let rounds = (tiles / shape.units as f64).ceil();
        rounds * 2.0 * rows * columns * (k + shape.ramp) / (unit * reached)
    };
    shape.tiles.iter().map(seconds).fold(f64::INFINITY, f64::min)
}

/// Bytes of a multiply's matrices.
fn moved([m, k, n]: [f64; 3], width: f64, sums: bool) -> f64 {
    let result = if sums { 8.0 } else { width };
    width * (m * k + k * n) + result * m * n
}

/// What is lost where rows do not begin at whole words of the memory.
fn aligned(shape: &Matmul, dims: [f64; 3], count: f64) -> f64 {
    let multiple = |of: f64| dims.iter().all(|dim| dim % of == 0.0);
    match (multiple(64.0), multiple(8.0)) {
        (true, _) => 1.0,
        (_, true) => shape.misaligned[0],
        _ if count == 1.0 => shape.misaligned[1],
        _ => shape.misaligned[2],
    }
}

/// The measured curve at a size; 1 where none was measured.
fn curve(shape: &Matmul, size: f64) -> f64 {
    let points = &shape.curve;
    let Some(after) = points.iter().position(|(at, _)| *at >= size) else {
        return points.last().map_or(1.0, |(_, reached)| *reached);
    };
    let Some(before) = after.checked_sub(1) else { return points[0].1 };
    let ((low, first), (high, second)) = (points[before], points[after]);
    first + (second - first) * (size / low).ln() / (high / low).ln()
}
