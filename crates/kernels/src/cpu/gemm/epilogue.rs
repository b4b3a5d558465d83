//! What happens to a finished tile of sums while it lies in L1: scale, bias, GELU, residual, and the store in
//! the output's type. Each step is one pass over the tile, so that types are looked at once per tile.

use super::gelu::gelu;
use super::{Data, DataMut, Epilogue};
use crate::Float;
use crate::cpu::Level;
use half::bf16;

/// Where tiles go. Members of the team write disjoint tiles of it.
pub struct Target<'a> {
    out: Raw,
    out_stride: usize,
    accumulate: bool,
    scale: f32,
    bias: Option<Data<'a>>,
    before_gelu: Option<Raw>,
    residual: Option<Data<'a>>,
    /// The row length of `before_gelu` and `residual`.
    n: usize,
}

#[derive(Clone, Copy)]
enum Raw {
    F32(*mut f32),
    Bf16(*mut bf16),
}

// SAFETY: the pointers come from exclusive borrows that live as long as the target, and every tile is
// finished by one member of the team.
unsafe impl Sync for Target<'_> {}

/// A tile of raw sums in a kernel's buffer, and its place in the output. Finishing overwrites it.
#[derive(Clone, Copy)]
pub struct Tile {
    pub sums: *mut f32,
    pub stride: usize,
    pub row: usize,
    pub col: usize,
    pub rows: usize,
    pub cols: usize,
}

impl<'a> Target<'a> {
    pub fn new(
        out: DataMut<'a>,
        out_stride: usize,
        accumulate: bool,
        scale: f32,
        epilogue: Epilogue<'a>,
        n: usize,
    ) -> Target<'a> {
        Target {
            out: raw(out),
            out_stride,
            accumulate,
            scale,
            bias: epilogue.bias,
            before_gelu: epilogue.gelu.map(raw),
            residual: epilogue.residual,
            n,
        }
    }

    /// # Safety
    /// The processor has `level`; the tile's sums are (rows, cols) within their stride, its place lies within
    /// the output's shape, and nobody else writes there.
    pub unsafe fn finish(&self, level: Level, tile: Tile) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Amx => finish_avx512(self, tile),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => finish_avx2(self, tile),
                _ => finish(self, tile),
            }
        }
    }
}

fn raw(data: DataMut<'_>) -> Raw {
    match data {
        DataMut::F32(values) => Raw::F32(values.as_mut_ptr()),
        DataMut::Bf16(values) => Raw::Bf16(values.as_mut_ptr()),
    }
}

/// # Safety
/// As `Target::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn finish_avx512(target: &Target<'_>, tile: Tile) {
    // SAFETY: the caller's promise, passed on.
    unsafe { finish(target, tile) }
}

/// # Safety
/// As `Target::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn finish_avx2(target: &Target<'_>, tile: Tile) {
    // SAFETY: the caller's promise, passed on.
    unsafe { finish(target, tile) }
}

/// # Safety
/// As `Target::finish`.
#[inline(always)]
unsafe fn finish(target: &Target<'_>, tile: Tile) {
    // SAFETY: every place below is inside the shape that `check` held against the slices.
    unsafe {
        let dense = tile.row * target.n + tile.col;
        if target.scale != 1.0 {
            change(tile, |sum| sum * target.scale);
        }
        match target.bias {
            Some(Data::F32(bias)) => add(tile, bias.as_ptr().add(tile.col), 0),
            Some(Data::Bf16(bias)) => add(tile, bias.as_ptr().add(tile.col), 0),
            None => {}
        }
        if let Some(before) = target.before_gelu {
            match before {
                Raw::F32(to) => store(tile, to.add(dense), target.n),
                Raw::Bf16(to) => store(tile, to.add(dense), target.n),
            }
            change(tile, gelu);
        }
        match target.residual {
            Some(Data::F32(residual)) => add(tile, residual.as_ptr().add(dense), target.n),
            Some(Data::Bf16(residual)) => add(tile, residual.as_ptr().add(dense), target.n),
            None => {}
        }
        let place = tile.row * target.out_stride + tile.col;
        match (target.out, target.accumulate) {
            (Raw::F32(out), false) => store(tile, out.add(place), target.out_stride),
            (Raw::Bf16(out), false) => store(tile, out.add(place), target.out_stride),
            (Raw::F32(out), true) => accumulate(tile, out.add(place), target.out_stride),
            (Raw::Bf16(out), true) => accumulate(tile, out.add(place), target.out_stride),
        }
    }
}

const LANES: usize = 16;

/// Calls `whole` for each full run of lanes in the tile and `part` for what is left of each row.
#[inline(always)]
fn each(tile: Tile, mut whole: impl FnMut(usize, usize), mut part: impl FnMut(usize, usize)) {
    for row in 0..tile.rows {
        let mut col = 0;
        while col + LANES <= tile.cols {
            whole(row, col);
            col += LANES;
        }
        for col in col..tile.cols {
            part(row, col);
        }
    }
}

/// # Safety
/// The tile lies where it says.
#[inline(always)]
unsafe fn change(tile: Tile, f: impl Fn(f32) -> f32 + Copy) {
    let one = |row, col| {
        // SAFETY: inside the tile.
        unsafe {
            let sum = tile.sums.add(row * tile.stride + col);
            *sum = f(*sum);
        }
    };
    each(tile, |row, col| (0..LANES).for_each(|lane| one(row, col + lane)), one);
}

/// Adds rows of `from`, `stride` apart, to the tile.
///
/// # Safety
/// The tile lies where it says, and `from` has its shape.
#[inline(always)]
unsafe fn add<T: Float>(tile: Tile, from: *const T, stride: usize) {
    let one = |row, col| {
        // SAFETY: inside the tile and what stands beside it.
        unsafe {
            *tile.sums.add(row * tile.stride + col) += (*from.add(row * stride + col)).wide()
        };
    };
    each(tile, |row, col| (0..LANES).for_each(|lane| one(row, col + lane)), one);
}

/// # Safety
/// The tile lies where it says, and `to` has its shape.
#[inline(always)]
unsafe fn store<T: Float>(tile: Tile, to: *mut T, stride: usize) {
    let one = |row, col| {
        // SAFETY: inside the tile and the output.
        unsafe { *to.add(row * stride + col) = T::narrow(*tile.sums.add(row * tile.stride + col)) };
    };
    // SAFETY: as for `one`; sixteen lanes are read before any is written.
    let sixteen = |row, col| unsafe {
        let sums = tile.sums.add(row * tile.stride + col).cast::<[f32; LANES]>().read();
        to.add(row * stride + col).cast::<[T; LANES]>().write(sums.map(T::narrow));
    };
    each(tile, sixteen, one);
}

/// # Safety
/// The tile lies where it says, and `to` has its shape.
#[inline(always)]
unsafe fn accumulate<T: Float>(tile: Tile, to: *mut T, stride: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        add(tile, to.cast_const(), stride);
        store(tile, to, stride);
    }
}
