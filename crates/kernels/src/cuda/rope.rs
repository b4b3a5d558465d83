//! Rotary position embedding.

use super::elementwise::{count, float_kernel, small};
use super::{Cuda, Grid, Source};
use crate::ViewMut;
use crate::cpu::rope::{Positions, Rope};

pub(crate) const ROPE: Source = Source { name: "rope", code: include_str!("kernels/rope.cu") };

/// Rotates every pair by the angle of its position.
pub(crate) fn forward(cuda: &Cuda, data: ViewMut<'_>, rope: &Rope<'_>) {
    rotate(cuda, data, rope, 1.0);
}

/// Rotates gradients back by the same angles.
pub(crate) fn backward(cuda: &Cuda, data: ViewMut<'_>, rope: &Rope<'_>) {
    rotate(cuda, data, rope, -1.0);
}

fn rotate(cuda: &Cuda, data: ViewMut<'_>, rope: &Rope<'_>, sign: f32) {
    let Rope { table, rows, heads, offset, stride, positions } = *rope;
    let Positions::From { start, len } = positions else {
        panic!("rotary embedding on a GPU takes ranges of positions, not lists");
    };
    if rows == 0 {
        return;
    }
    let half = table.head_dim() / 2;
    let width = offset + heads * 2 * half;
    assert!(
        width <= stride && (rows - 1) * stride + width <= data.len(),
        "{rows} rows of {width} with stride {stride} exceed {data:?}"
    );
    let end = start + rows.min(len);
    assert!(
        end <= table.positions(),
        "position {} is out of range: the table has {} positions",
        end - 1,
        table.positions()
    );
    // Cosines, then sines.
    let cos = cuda.upload_once(table.id(), || table.cosines_and_sines());
    let sin = cos + (table.positions() * half * 4) as u64;
    let first = data.address() + (offset * data.dtype().bytes()) as u64;
    let args = [
        first.into(),
        cos.into(),
        sin.into(),
        count(rows),
        count(stride),
        small(heads),
        small(half),
        count(start),
        count(len),
        sign.into(),
    ];
    let threads = (heads * half / (16 / data.dtype().bytes())).next_multiple_of(32).clamp(32, 256);
    let kernel = float_kernel!("rope", data.dtype());
    cuda.launch(&ROPE, kernel, Grid::new(rows, threads as u32), &args);
}
