//! The epilogue of a finished tile in L1: scale, bias, GELU, residual, and the store in the output's type. Each step
//! is one pass over the tile, so that types are matched once per tile.

use super::masked_vector::MaskedVector;
#[cfg(target_arch = "x86_64")]
use super::masked_vector::Zmm;
use super::panel::Accumulator;
use super::{Data, DataMut};
use crate::Float;
use crate::cpu::Level;
use half::bf16;

/// The output with its epilogue. Threads write disjoint tiles of it.
pub struct Output<'a> {
    pub out: OutputPtr,
    pub out_stride: usize,
    pub accumulate: bool,
    pub scale: f32,
    pub bias: Option<Data<'a>>,
    pub gelu_input: Option<OutputPtr>,
    pub residual: Option<Data<'a>>,
    /// The row length of `gelu_input` and `residual`.
    pub n: usize,
}

#[derive(Clone, Copy)]
pub enum OutputPtr {
    F32(*mut f32),
    Bf16(*mut bf16),
}

impl From<DataMut<'_>> for OutputPtr {
    fn from(data: DataMut<'_>) -> OutputPtr {
        match data {
            DataMut::F32(values) => OutputPtr::F32(values.as_mut_ptr()),
            DataMut::Bf16(values) => OutputPtr::Bf16(values.as_mut_ptr()),
        }
    }
}

// SAFETY: the pointers come from exclusive borrows that live as long as the output, and every tile is finished by one
// thread.
unsafe impl Sync for Output<'_> {}

/// A tile of sums in an accumulator, and its position in the output. Finishing overwrites the sums.
#[derive(Clone, Copy)]
pub struct Tile {
    pub sums: *mut f32,
    pub stride: usize,
    pub row: usize,
    pub col: usize,
    pub rows: usize,
    pub cols: usize,
}

/// An f32 output without an epilogue, in which micro-kernels accumulate directly.
#[derive(Clone, Copy)]
pub struct DirectOutput {
    start: *mut f32,
    stride: usize,
    /// Add to the stored values.
    pub accumulate: bool,
}

impl DirectOutput {
    /// A whole tile of the output as the accumulator.
    ///
    /// # Safety
    /// The tile is within the output.
    pub unsafe fn accumulator(&self, row: usize, col: usize, accumulate: bool) -> Accumulator {
        // SAFETY: the caller's promise.
        let start = unsafe { self.start.add(row * self.stride + col) };
        Accumulator {
            start,
            stride: self.stride,
            accumulate,
            output: start.cast(),
            output_stride: 4 * self.stride,
            next: start,
        }
    }

    /// Copies an incomplete tile from the output to its accumulator.
    ///
    /// # Safety
    /// The tile is within the output, and its accumulator is not.
    pub unsafe fn load(&self, tile: Tile) {
        for row in 0..tile.rows {
            // SAFETY: the caller's promise.
            unsafe {
                let from = self.start.add((tile.row + row) * self.stride + tile.col);
                std::ptr::copy_nonoverlapping(from, tile.sums.add(row * tile.stride), tile.cols);
            }
        }
    }

    /// Copies it back.
    ///
    /// # Safety
    /// As `lift`, and nobody else writes there.
    pub unsafe fn store(&self, tile: Tile) {
        for row in 0..tile.rows {
            // SAFETY: the caller's promise.
            unsafe {
                let to = self.start.add((tile.row + row) * self.stride + tile.col);
                std::ptr::copy_nonoverlapping(tile.sums.add(row * tile.stride), to, tile.cols);
            }
        }
    }
}

impl Output<'_> {
    /// The output for direct accumulation, if it is f32 and has no epilogue.
    pub fn direct(&self) -> Option<DirectOutput> {
        let plain = self.scale == 1.0
            && self.bias.is_none()
            && self.gelu_input.is_none()
            && self.residual.is_none();
        let (stride, accumulate) = (self.out_stride, self.accumulate);
        match self.out {
            OutputPtr::F32(start) if plain => Some(DirectOutput { start, stride, accumulate }),
            _ => None,
        }
    }

    /// Address of an element of the output, and bytes between rows.
    pub fn place(&self, row: usize, col: usize) -> (*const u8, usize) {
        let (start, bytes) = match self.out {
            OutputPtr::F32(start) => (start.cast::<u8>(), 4),
            OutputPtr::Bf16(start) => (start.cast(), 2),
        };
        let stride = bytes * self.out_stride;
        (start.wrapping_add(row * stride + bytes * col), stride)
    }

    /// Applies the epilogue and writes the output.
    ///
    /// # Safety
    /// The processor supports `level`; the tile's accumulator holds (rows, cols), its position is within the output,
    /// and no other thread writes there.
    pub unsafe fn finish(&self, level: Level, tile: Tile) {
        // SAFETY: the caller's promise.
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

/// # Safety
/// As `Output::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn finish_avx512(output: &Output<'_>, tile: Tile) {
    // SAFETY: the caller's promise.
    unsafe { finish::<Zmm<false>>(output, tile) }
}

/// # Safety
/// As `Output::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
unsafe fn finish_amx(output: &Output<'_>, tile: Tile) {
    // SAFETY: the caller's promise.
    unsafe { finish::<Zmm<true>>(output, tile) }
}

/// # Safety
/// As `Output::finish`, on a processor with these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn finish_avx2(output: &Output<'_>, tile: Tile) {
    // SAFETY: the caller's promise.
    unsafe { finish::<[f32; 8]>(output, tile) }
}

/// # Safety
/// As `Output::finish`.
#[inline(always)]
unsafe fn finish<V: MaskedVector>(output: &Output<'_>, tile: Tile) {
    // SAFETY: all positions are within the shape, which `check` compared with the slices.
    unsafe {
        let dense = tile.row * output.n + tile.col;
        if output.scale != 1.0 {
            scale::<V>(tile, output.scale);
        }
        match output.bias {
            Some(Data::F32(bias)) => add::<V, _>(tile, bias.as_ptr().add(tile.col), 0),
            Some(Data::Bf16(bias)) => add::<V, _>(tile, bias.as_ptr().add(tile.col), 0),
            None => {}
        }
        if let Some(input) = output.gelu_input {
            match input {
                OutputPtr::F32(to) => store::<V, _>(tile, to.add(dense), output.n),
                OutputPtr::Bf16(to) => store::<V, _>(tile, to.add(dense), output.n),
            }
            gelu::<V>(tile);
        }
        match output.residual {
            Some(Data::F32(residual)) => add::<V, _>(tile, residual.as_ptr().add(dense), output.n),
            Some(Data::Bf16(residual)) => add::<V, _>(tile, residual.as_ptr().add(dense), output.n),
            None => {}
        }
        let place = tile.row * output.out_stride + tile.col;
        match (output.out, output.accumulate) {
            (OutputPtr::F32(out), false) => store::<V, _>(tile, out.add(place), output.out_stride),
            (OutputPtr::Bf16(out), false) => store::<V, _>(tile, out.add(place), output.out_stride),
            (OutputPtr::F32(out), true) => {
                accumulate::<V, _>(tile, out.add(place), output.out_stride)
            }
            (OutputPtr::Bf16(out), true) => {
                accumulate::<V, _>(tile, out.add(place), output.out_stride)
            }
        }
    }
}

/// Runs a block for every vector of a tile, with its address, row, column and number of elements. Full vectors have a
/// loop of their own, in which that number is a constant.
macro_rules! for_each_vector {
    ($tile:expr, |$sums:ident, $row:ident, $col:ident, $count:ident| $pass:block) => {{
        let full = $tile.cols / V::LANES * V::LANES;
        for $row in 0..$tile.rows {
            for $col in (0..full).step_by(V::LANES) {
                let $sums = $tile.sums.add($row * $tile.stride + $col);
                let $count = V::LANES;
                $pass
            }
            if full < $tile.cols {
                let ($col, $count) = (full, $tile.cols - full);
                let $sums = $tile.sums.add($row * $tile.stride + $col);
                $pass
            }
        }
    }};
}

/// # Safety
/// The tile's accumulator can be read and written, and the processor supports `V`.
#[inline(always)]
unsafe fn scale<V: MaskedVector>(tile: Tile, by: f32) {
    // SAFETY: inside the tile.
    unsafe {
        for_each_vector!(tile, |sums, _row, _col, count| {
            V::load(sums, count).scale(by).store(sums, count)
        })
    }
}

/// # Safety
/// As `scale`.
#[inline(always)]
unsafe fn gelu<V: MaskedVector>(tile: Tile) {
    // SAFETY: inside the tile.
    unsafe {
        for_each_vector!(tile, |sums, _row, _col, count| {
            V::load(sums, count).gelu().store(sums, count)
        })
    }
}

/// Adds rows of `from`, `stride` elements apart, to the tile.
///
/// # Safety
/// As `scale`, and `from` has the tile's shape.
#[inline(always)]
unsafe fn add<V: MaskedVector, T: Float>(tile: Tile, from: *const T, stride: usize) {
    // SAFETY: inside the tile and `from`.
    unsafe {
        for_each_vector!(tile, |sums, row, col, count| {
            let addend = V::load(from.add(row * stride + col), count);
            V::load(sums, count).add(addend).store(sums, count);
        })
    }
}

/// # Safety
/// As `scale`, and `to` has the tile's shape.
#[inline(always)]
unsafe fn store<V: MaskedVector, T: Float>(tile: Tile, to: *mut T, stride: usize) {
    // SAFETY: inside the tile and the output.
    unsafe {
        if tile.cols == 2 * V::LANES {
            for row in 0..tile.rows {
                let sums = tile.sums.add(row * tile.stride);
                let next = V::load(sums.add(V::LANES), V::LANES);
                V::load(sums, V::LANES).store_two(next, to.add(row * stride));
            }
            return;
        }
        for_each_vector!(tile, |sums, row, col, count| {
            V::load(sums, count).store(to.add(row * stride + col), count);
        })
    }
}

/// # Safety
/// As `scale`, and `to` has the tile's shape.
#[inline(always)]
unsafe fn accumulate<V: MaskedVector, T: Float>(tile: Tile, to: *mut T, stride: usize) {
    // SAFETY: inside the tile and the output.
    unsafe {
        for_each_vector!(tile, |sums, row, col, count| {
            let to = to.add(row * stride + col);
            V::load(to, count).add(V::load(sums, count)).store(to, count);
        })
    }
}
