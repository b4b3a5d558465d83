//! Token and position embeddings.

use super::elementwise::{THREADS, count, flag, float_kernel, optional, row_per_warp};
use super::sort::{Sort, Sorted};
use super::{Arg, Cuda, Grid, Source};
use crate::{Dtype, PositionRange, View, ViewMut, VocabShard};

pub(crate) const EMBEDDING: Source =
    Source { name: "embedding", code: include_str!("kernels/embedding.cu") };

/// Token ids, and the shard of the vocabulary that the table holds.
#[derive(Clone, Copy)]
pub(crate) struct Tokens<'a> {
    pub ids: View<'a>,
    pub shard: VocabShard,
}

/// An id that exceeds the vocabulary gives a row of NaN.
pub(crate) fn forward(
    cuda: &Cuda,
    Tokens { ids, shard }: Tokens<'_>,
    table: View<'_>,
    positions: Option<(View<'_>, PositionRange)>,
    out: ViewMut<'_>,
) {
    let tokens = ids.len();
    let Some(dim) = out.len().checked_div(tokens) else { return };
    assert!(
        out.len() == tokens * dim && dim > 0 && table.len().is_multiple_of(dim),
        "embedding of {ids:?} with {table:?} to {out:?}"
    );
    assert_eq!((ids.dtype(), table.dtype()), (Dtype::U32, out.dtype()), "dtypes of ids and output");
    let range = positions.map_or(PositionRange { start: 0, len: 1 }, |(_, range)| range);
    if let Some((table, _)) = positions {
        assert_eq!(table.dtype(), out.dtype(), "dtype of the positions");
        check_positions(range, tokens, table.len() / dim);
    }
    let args = [
        ids.into(),
        table.into(),
        optional(positions.map(|(table, _)| table)),
        out.into(),
        count(tokens),
        count(dim),
        word(shard.first),
        count(table.len() / dim),
        word(shard.vocab),
        count(range.start),
        count(range.len),
    ];
    cuda.launch(&EMBEDDING, float_kernel!("embed", table.dtype()), row_per_warp(tokens), &args);
}

/// Threads of a block that sums, as in the kernels.
const SUM_THREADS: u32 = 128;

/// Sorted tokens that one block sums at most, as in the kernels.
const PIECE: usize = 64;

/// Sorts the tokens by their row of the table, so that each row is summed in a fixed order.
pub(crate) fn backward(
    cuda: &Cuda,
    Tokens { ids, shard }: Tokens<'_>,
    dy: View<'_>,
    dtable: ViewMut<'_>,
    accumulate: bool,
) {
    clear_unless(cuda, accumulate, &dtable);
    let tokens = ids.len();
    let Some(dim) = dy.len().checked_div(tokens) else { return };
    assert!(
        dy.len() == tokens * dim && dim > 0 && dtable.len().is_multiple_of(dim),
        "gradient {dy:?} of {ids:?} to {dtable:?}"
    );
    assert_eq!(
        (ids.dtype(), dtable.dtype()),
        (Dtype::U32, Dtype::F32),
        "dtypes of ids and gradient"
    );
    let rows = dtable.len() / dim;
    let pieces = tokens.div_ceil(PIECE);
    let scratch = cuda.scratch(Sort::bytes(tokens) + 2 * pieces * dim * size_of::<f32>());
    let sort = Sort::new(tokens, scratch.address());
    let partial = scratch.address() + Sort::bytes(tokens) as u64;
    let args = [ids.into(), sort.keys().into(), count(tokens), word(shard.first), word(rows)];
    cuda.launch(&EMBEDDING, "embed_keys", Grid::over(tokens, THREADS), &args);
    let Sorted { keys, order } = sort.run(cuda, rows);
    let args = [
        keys.into(),
        order.into(),
        dy.into(),
        dtable.address().into(),
        partial.into(),
        count(tokens),
        count(dim),
        word(rows),
        flag(accumulate),
    ];
    let kernel = float_kernel!("embed_backward", dy.dtype());
    cuda.launch(&EMBEDDING, kernel, Grid::new(tokens, SUM_THREADS), &args);
    let spans = dim.div_ceil(SUM_THREADS as usize);
    let args = [
        keys.into(),
        partial.into(),
        dtable.into(),
        count(tokens),
        count(dim),
        word(rows),
        count(spans),
        flag(accumulate),
    ];
    cuda.launch(&EMBEDDING, "embed_add_pieces", Grid::new(pieces * spans, SUM_THREADS), &args);
}

/// Gradient of the position table.
pub(crate) fn positions_backward(
    cuda: &Cuda,
    dy: View<'_>,
    range: PositionRange,
    dpositions: ViewMut<'_>,
    accumulate: bool,
) {
    clear_unless(cuda, accumulate, &dpositions);
    let (rows, dim) = (dy.rows(), dy.cols());
    assert_eq!(dpositions.dtype(), Dtype::F32, "dtype of the gradient");
    if dy.is_empty() {
        return;
    }
    check_positions(range, rows, dpositions.len() / dim);
    let args = [
        dy.into(),
        dpositions.into(),
        count(rows),
        count(dim),
        count(range.start),
        count(range.len),
        flag(accumulate),
    ];
    let kernel = float_kernel!("embed_positions_backward", dy.dtype());
    cuda.launch(&EMBEDDING, kernel, Grid::new(range.len.min(rows), SUM_THREADS), &args);
}

fn clear_unless(cuda: &Cuda, accumulate: bool, gradient: &ViewMut<'_>) {
    if !accumulate && !gradient.is_empty() {
        cuda.memset(gradient.address(), 0, gradient.len() * gradient.dtype().bytes());
    }
}

fn check_positions(range: PositionRange, rows: usize, positions: usize) {
    let end = range.start + range.len.min(rows);
    assert!(
        range.len > 0 && end <= positions,
        "position {} is out of range: the table has {positions}",
        end.saturating_sub(1)
    );
}

fn word(n: usize) -> Arg {
    Arg::from(u32::try_from(n).unwrap_or_else(|_| panic!("{n} exceeds the range of token ids")))
}
