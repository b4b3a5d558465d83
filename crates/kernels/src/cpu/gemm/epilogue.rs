//! What happens to a finished tile of sums while it lies in L1: scale, bias, GELU, residual, and the store in
//! the output's type. Each step is one pass over the tile, so that types are looked at once per tile.

use super::kernel::Sums;
use super::wide::Wide;
#[cfg(target_arch = "x86_64")]
use super::wide::Zmm;
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

/// An output of f32 that kernels write themselves.
#[derive(Clone, Copy)]
pub struct Direct {
    start: *mut f32,
    stride: usize,
    /// On top of what is there.
    pub resume: bool,
}

impl Direct {
    /// The place of a whole tile, to be summed in.
    ///
    /// # Safety
    /// The place lies within the output.
    pub unsafe fn sums(&self, row: usize, col: usize, resume: bool) -> Sums {
        // SAFETY: the caller's promise, passed on.
        let start = unsafe { self.start.add(row * self.stride + col) };
        Sums {
            start,
            stride: self.stride,
            resume,
            place: start.cast(),
            place_stride: 4 * self.stride,
            next: start,
        }
    }

    /// Copies part of a tile out of its place, for a kernel that only knows whole ones.
    ///
    /// # Safety
    /// The tile lies within the output, and its sums in a buffer of their own.
    pub unsafe fn lift(&self, tile: Tile) {
        for row in 0..tile.rows {
            // SAFETY: the caller's promise, passed on.
            unsafe {
                let from = self.start.add((tile.row + row) * self.stride + tile.col);
                std::ptr::copy_nonoverlapping(from, tile.sums.add(row * tile.stride), tile.cols);
            }
        }
    }

    /// And back.
    ///
    /// # Safety
    /// As `lift`, and nobody else writes there.
    pub unsafe fn lower(&self, tile: Tile) {
        for row in 0..tile.rows {
            // SAFETY: the caller's promise, passed on.
            unsafe {
                let to = self.start.add((tile.row + row) * self.stride + tile.col);
                std::ptr::copy_nonoverlapping(tile.sums.add(row * tile.stride), to, tile.cols);
            }
        }
    }
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

    /// Sums may be made in the output itself, on top of what is there or not: nothing is done to them after.
    pub fn direct(&self) -> Option<Direct> {
        let plain = self.scale == 1.0
            && self.bias.is_none()
            && self.before_gelu.is_none()
            && self.residual.is_none();
        match self.out {
            Raw::F32(start) if plain => {
                Some(Direct { start, stride: self.out_stride, resume: self.accumulate })
            }
            _ => None,
        }
    }

    /// Where a row of the output begins, in bytes, and how far it is to the next one.
    pub fn place(&self, row: usize, col: usize) -> (*const u8, usize) {
        let (start, bytes) = match self.out {
            Raw::F32(start) => (start.cast::<u8>(), 4),
            Raw::Bf16(start) => (start.cast(), 2),
        };
        let stride = bytes * self.out_stride;
        (start.wrapping_add(row * stride + bytes * col), stride)
    }

    /// # Safety
    /// The processor has `level`; the tile's sums are (rows, cols) within their stride, its place lies within
    /// the output's shape, and nobody else writes there.
    pub unsafe fn finish(&self, level: Level, tile: Tile) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Amx => finish_amx(self, tile),
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => finish_avx512(self, tile),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => finish_avx2(self, tile),
                _ => finish::<[f32; 8]>(self, tile),
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
    unsafe { finish::<Zmm<false>>(target, tile) }
}

/// # Safety
/// As `Target::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn finish_amx(target: &Target<'_>, tile: Tile) {
    // SAFETY: the caller's promise, passed on.
    unsafe { finish::<Zmm<true>>(target, tile) }
}

/// # Safety
/// As `Target::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn finish_avx2(target: &Target<'_>, tile: Tile) {
    // SAFETY: the caller's promise, passed on.
    unsafe { finish::<[f32; 8]>(target, tile) }
}

/// # Safety
/// As `Target::finish`.
#[inline(always)]
unsafe fn finish<W: Wide>(target: &Target<'_>, tile: Tile) {
    // SAFETY: every place below is inside the shape that `check` held against the slices.
    unsafe {
        let dense = tile.row * target.n + tile.col;
        if target.scale != 1.0 {
            scale::<W>(tile, target.scale);
        }
        match target.bias {
            Some(Data::F32(bias)) => add::<W, _>(tile, bias.as_ptr().add(tile.col), 0),
            Some(Data::Bf16(bias)) => add::<W, _>(tile, bias.as_ptr().add(tile.col), 0),
            None => {}
        }
        if let Some(before) = target.before_gelu {
            match before {
                Raw::F32(to) => store::<W, _>(tile, to.add(dense), target.n),
                Raw::Bf16(to) => store::<W, _>(tile, to.add(dense), target.n),
            }
            gelu::<W>(tile);
        }
        match target.residual {
            Some(Data::F32(residual)) => add::<W, _>(tile, residual.as_ptr().add(dense), target.n),
            Some(Data::Bf16(residual)) => add::<W, _>(tile, residual.as_ptr().add(dense), target.n),
            None => {}
        }
        let place = tile.row * target.out_stride + tile.col;
        match (target.out, target.accumulate) {
            (Raw::F32(out), false) => store::<W, _>(tile, out.add(place), target.out_stride),
            (Raw::Bf16(out), false) => store::<W, _>(tile, out.add(place), target.out_stride),
            (Raw::F32(out), true) => accumulate::<W, _>(tile, out.add(place), target.out_stride),
            (Raw::Bf16(out), true) => accumulate::<W, _>(tile, out.add(place), target.out_stride),
        }
    }
}

/// Does a pass for every run of lanes of a tile: where its sums lie, its row and column, and how many there are.
/// Whole runs have a loop of their own, in which their number is a constant.
macro_rules! each_run {
    ($tile:expr, |$sums:ident, $row:ident, $col:ident, $count:ident| $pass:block) => {{
        let whole = $tile.cols / W::COUNT * W::COUNT;
        for $row in 0..$tile.rows {
            for $col in (0..whole).step_by(W::COUNT) {
                let $sums = $tile.sums.add($row * $tile.stride + $col);
                let $count = W::COUNT;
                $pass
            }
            if whole < $tile.cols {
                let ($col, $count) = (whole, $tile.cols - whole);
                let $sums = $tile.sums.add($row * $tile.stride + $col);
                $pass
            }
        }
    }};
}

/// # Safety
/// The tile lies where it says, and the processor has `W`.
#[inline(always)]
unsafe fn scale<W: Wide>(tile: Tile, by: f32) {
    // SAFETY: inside the tile.
    unsafe {
        each_run!(tile, |sums, _row, _col, count| {
            W::get(sums, count).times(by).put(sums, count)
        })
    }
}

/// # Safety
/// As `scale`.
#[inline(always)]
unsafe fn gelu<W: Wide>(tile: Tile) {
    // SAFETY: inside the tile.
    unsafe {
        each_run!(tile, |sums, _row, _col, count| { W::get(sums, count).gelu().put(sums, count) })
    }
}

/// Adds rows of `from`, `stride` apart, to the tile.
///
/// # Safety
/// As `scale`, and `from` has the tile's shape.
#[inline(always)]
unsafe fn add<W: Wide, T: Float>(tile: Tile, from: *const T, stride: usize) {
    // SAFETY: inside the tile and what stands beside it.
    unsafe {
        each_run!(tile, |sums, row, col, count| {
            let more = W::get(from.add(row * stride + col), count);
            W::get(sums, count).plus(more).put(sums, count);
        })
    }
}

/// # Safety
/// As `scale`, and `to` has the tile's shape.
#[inline(always)]
unsafe fn store<W: Wide, T: Float>(tile: Tile, to: *mut T, stride: usize) {
    // SAFETY: inside the tile and the output.
    unsafe {
        if tile.cols == 2 * W::COUNT {
            for row in 0..tile.rows {
                let sums = tile.sums.add(row * tile.stride);
                let next = W::get(sums.add(W::COUNT), W::COUNT);
                W::get(sums, W::COUNT).put_both(next, to.add(row * stride));
            }
            return;
        }
        each_run!(tile, |sums, row, col, count| {
            W::get(sums, count).put(to.add(row * stride + col), count);
        })
    }
}

/// # Safety
/// As `scale`, and `to` has the tile's shape.
#[inline(always)]
unsafe fn accumulate<W: Wide, T: Float>(tile: Tile, to: *mut T, stride: usize) {
    // SAFETY: inside the tile and the output.
    unsafe {
        each_run!(tile, |sums, row, col, count| {
            let to = to.add(row * stride + col);
            W::get(to, count).plus(W::get(sums, count)).put(to, count);
        })
    }
}
