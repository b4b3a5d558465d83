//! Compression of gradients: quantized codes and top-k pairs, with the same bits as on the CPU.

use super::elementwise::{ELEMENTWISE, THREADS, count, vectors};
use super::sort::{Sort, Sorted};
use super::{Cuda, Grid, Source};
use crate::cpu::top_k::PAIR_BYTES;
use crate::device::SCALE_CHUNK;
use crate::{Code, Dtype, View, ViewMut};

pub(crate) const PACK: Source = Source { name: "pack", code: include_str!("kernels/pack.cu") };

/// Values of a digit of the search for the k-th largest magnitude, as in the kernels.
const DIGIT_VALUES: usize = 2048;

/// Elements of a block that takes the top-k elements, as in the kernels.
const TILE: usize = 4096;

/// Position and number of bits of the digits of a magnitude.
const DIGITS: [(i32, i32); 3] = [(20, 11), (10, 10), (0, 10)];

pub(crate) fn pack(cuda: &Cuda, code: Code, x: View<'_>, error: ViewMut<'_>, packed: ViewMut<'_>) {
    let n = x.len();
    assert_eq!(error.len(), n, "x and its error must have equal length");
    check_packed(code, n, packed.len());
    let (kernel, grid) = match code {
        Code::Bf16 => ("pack_bf16", vectors(n, Dtype::F32, 2)),
        // A chunk per warp.
        Code::F16 => ("pack_f16", Grid::over(n.div_ceil(SCALE_CHUNK) * 32, THREADS)),
        Code::Int8 => ("pack_int8", Grid::over(n.div_ceil(SCALE_CHUNK) * 32, THREADS)),
    };
    cuda.launch(&PACK, kernel, grid, &[x.into(), error.into(), packed.into(), count(n)]);
}

pub(crate) fn unpack(cuda: &Cuda, code: Code, packed: View<'_>, out: ViewMut<'_>) {
    let kernel = match code {
        Code::Bf16 => "unpack_bf16",
        Code::F16 => "unpack_f16",
        Code::Int8 => "unpack_int8",
    };
    launch_unpack(cuda, kernel, code, packed, out);
}

pub(crate) fn add_unpacked(cuda: &Cuda, code: Code, packed: View<'_>, out: ViewMut<'_>) {
    let kernel = match code {
        Code::Bf16 => "add_unpacked_bf16",
        Code::F16 => "add_unpacked_f16",
        Code::Int8 => "add_unpacked_int8",
    };
    launch_unpack(cuda, kernel, code, packed, out);
}

fn launch_unpack(
    cuda: &Cuda,
    kernel: &'static str,
    code: Code,
    packed: View<'_>,
    out: ViewMut<'_>,
) {
    let n = out.len();
    check_packed(code, n, packed.len());
    let grid = vectors(n, Dtype::F32, 2);
    cuda.launch(&PACK, kernel, grid, &[packed.into(), out.into(), count(n)]);
}

fn check_packed(code: Code, n: usize, packed: usize) {
    let bytes = code.bytes(n);
    assert_eq!(packed, bytes, "{n} numbers in {code:?} take {bytes} bytes, not {packed}");
}

/// Tensors of a selection: all have the same length, except the pairs.
pub(crate) struct TopK<'a> {
    pub x: View<'a>,
    pub residual: ViewMut<'a>,
    pub squares: ViewMut<'a>,
    /// Scratch.
    pub ratios: ViewMut<'a>,
    pub pairs: ViewMut<'a>,
}

pub(crate) fn take_topk(cuda: &Cuda, work: TopK<'_>) {
    let TopK { x, residual, squares, ratios, pairs } = work;
    let (n, k) = (x.len(), pairs.len() / PAIR_BYTES);
    let lens = [residual.len(), squares.len(), ratios.len()];
    assert!(lens.iter().all(|len| *len == n), "{n} elements, and {lens:?}");
    assert!(pairs.len().is_multiple_of(PAIR_BYTES), "{} bytes are not pairs", pairs.len());
    assert!(k <= n, "k={k} exceeds the {n} elements");
    assert!(n <= u32::MAX as usize, "{n} elements exceed the range of u32 indices");
    let args = [x.into(), (&residual).into(), (&squares).into(), (&ratios).into(), count(n)];
    cuda.launch(&PACK, "topk_ratios", vectors(n, Dtype::F32, 1), &args);
    if k == 0 {
        return;
    }

    // The search's state and counts are zero, apart from the number of elements to find.
    let tiles = n.div_ceil(TILE);
    let scratch = cuda.scratch(256 + DIGIT_VALUES * 4 + tiles * 8);
    let search = scratch.address();
    let (counts, offsets) = (search + 256, search + 256 + DIGIT_VALUES as u64 * 4);
    cuda.memset(search, 0, 256 + DIGIT_VALUES * 4);
    let args = [(search + 4).into(), (k as u32).into(), count(1)];
    cuda.launch(&ELEMENTWISE, "fill_u32", Grid::new(1, 32), &args);
    for (shift, width) in DIGITS {
        let grid = Grid::new(n.div_ceil(THREADS as usize * 16).min(1024), THREADS);
        let args =
            [(&ratios).into(), counts.into(), search.into(), count(n), shift.into(), width.into()];
        cuda.launch(&PACK, "topk_count", grid, &args);
        let args = [counts.into(), search.into(), width.into()];
        cuda.launch(&PACK, "topk_digit", Grid::new(1, 1024), &args);
    }

    let args = [(&ratios).into(), offsets.into(), search.into(), count(n)];
    cuda.launch(&PACK, "topk_tiles", Grid::new(tiles, THREADS), &args);
    let args = [offsets.into(), count(tiles)];
    cuda.launch(&PACK, "topk_offsets", Grid::new(1, 1024), &args);
    let args = [
        ratios.into(),
        residual.into(),
        squares.into(),
        pairs.into(),
        offsets.into(),
        search.into(),
        count(n),
    ];
    cuda.launch(&PACK, "topk_take", Grid::new(tiles, THREADS), &args);
}

pub(crate) fn follow_squares(cuda: &Cuda, x: View<'_>, squares: ViewMut<'_>) {
    let n = x.len();
    assert_eq!(n, squares.len(), "x and squares must have equal length");
    let args = [x.into(), squares.into(), count(n)];
    cuda.launch(&PACK, "follow_squares", Grid::over(n, THREADS), &args);
}

/// Adds pairs to `out`, whose first element has the index `first`. Pairs of one element are added in their order.
pub(crate) fn add_pairs(cuda: &Cuda, pairs: View<'_>, first: usize, out: ViewMut<'_>) {
    let (n, len) = (pairs.len() / PAIR_BYTES, out.len());
    if n == 0 {
        return;
    }
    let bound = u32::try_from(len).expect("indices of pairs are u32");
    let scratch = cuda.scratch(Sort::bytes(n));
    let sort = Sort::new(n, scratch.address());
    let grid = Grid::over(n, THREADS);
    let args = [pairs.into(), sort.keys().into(), count(n), (first as u64).into(), bound.into()];
    cuda.launch(&PACK, "pair_keys", grid, &args);
    let Sorted { keys, order } = sort.run(cuda, len);
    let args = [pairs.into(), keys.into(), order.into(), out.into(), count(n), bound.into()];
    cuda.launch(&PACK, "add_pairs", grid, &args);
}

/// Number of pairs whose index is below `index`. Waits for the result.
pub(crate) fn pairs_below(cuda: &Cuda, pairs: View<'_>, index: usize) -> usize {
    let n = pairs.len() / PAIR_BYTES;
    let found = cuda.scalar(|out| {
        let args = [pairs.into(), count(n), (index as u64).into(), out.into()];
        cuda.launch(&PACK, "pairs_below", Grid::new(1, 1), &args);
    });
    found.get() as usize
}
