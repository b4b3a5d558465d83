//! Types shared by the micro-kernels, the packing routines and the loop nest. Chooses no kernel: that is
//! `kernel.rs`.

use super::Operand;
use std::ops::Range;

/// Adds the product of panels `a` (rows, k) and `b` (k, nr) to the accumulator tile.
pub type Multiply = unsafe fn(&KernelArgs);

/// Packs one side of the product into consecutive panels.
pub type Pack = unsafe fn(job: &PackJob<'_>, panels: *mut u8);

/// Arguments of one micro-kernel call.
#[derive(Clone, Copy)]
pub struct KernelArgs {
    pub rows: usize,
    pub k: usize,
    pub a: PanelA,
    /// A packed panel.
    pub b: *const u8,
    pub prefetch: PrefetchA,
    pub acc: Accumulator,
}

/// A panel of `a`: packed, or rows of the matrix itself.
#[derive(Clone, Copy)]
pub struct PanelA {
    pub start: *const u8,
    /// Bytes between rows, and between elements along k, of rows read in place; 0 for a packed panel.
    pub row_stride: usize,
    pub k_stride: usize,
}

/// The next panel of `a`, with the same layout as the current one. The tiles of the current panel prefetch it
/// together; this is the part of tile `tile` of `tiles`.
#[derive(Clone, Copy)]
pub struct PrefetchA {
    pub next: *const u8,
    pub tile: usize,
    pub tiles: usize,
}

/// A tile of partial sums, in the output or in scratch.
#[derive(Clone, Copy)]
pub struct Accumulator {
    pub start: *mut f32,
    /// Elements between rows.
    pub stride: usize,
    /// Add to the stored values; otherwise overwrite them.
    pub accumulate: bool,
    /// Destination of the finished tile and bytes between its rows, prefetched for writing.
    pub output: *const u8,
    pub output_stride: usize,
    /// Accumulator of the next tile, prefetched as well; equal to `start` if there is nothing to prefetch.
    pub next: *const f32,
}

/// A panel of `a` that the loop nest needs, described to `MicroKernel::unpacked_a`.
pub struct PanelRequest {
    pub rows: Range<usize>,
    pub ks: Range<usize>,
    /// Block size along k.
    pub kc: usize,
    /// Rows of a full panel.
    pub mr: usize,
    /// Columns of the whole product.
    pub n: usize,
}

/// A range of one operand to pack, as panels of `width` rows of `a` or columns of `b`. The last panel is padded
/// with zeros.
pub struct PackJob<'a> {
    pub from: Operand<'a>,
    /// Rows of `a` or columns of `b`.
    pub outer: Range<usize>,
    pub ks: Range<usize>,
    pub width: usize,
    /// Elements from one panel to the next.
    pub panel_stride: usize,
}
