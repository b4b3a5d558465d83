//! Mixture of experts: routing, load balancing, and moving rows to experts and back.

use super::elementwise::{
    THREADS, count, flag, float_kernel, optional, row_per_warp, small, vectors,
};
use super::reduce::column_sums_of;
use super::{Cuda, Grid, Source};
use crate::{Capacity, Combine, Router, RouterOutput, RouterSaved, Scalar, View, ViewMut};

pub(crate) const ROUTING: Source =
    Source { name: "routing", code: include_str!("kernels/routing.cu") };

/// Counts of experts fit in the shared memory of any GPU.
const MAX_EXPERTS: usize = 12_288;

/// Fewest slots of a tile when slots are grouped.
const MIN_TILE: usize = 1024;

/// Most tiles of one scope, which one thread walks for each expert.
const MAX_TILES: usize = 256;

pub(crate) fn route(cuda: &Cuda, router: &Router, logits: View<'_>, output: RouterOutput<'_>) {
    let RouterOutput { probs, log_sum, chosen, weights } = output;
    let Router { experts, top_k, renormalize } = *router;
    let tokens = tokens(router, logits.len());
    let lens = [probs.len(), log_sum.len(), chosen.len(), weights.len()];
    assert_eq!(lens, [logits.len(), tokens, tokens * top_k, tokens * top_k], "router's outputs");
    let args = [
        logits.into(),
        probs.into(),
        log_sum.into(),
        chosen.into(),
        weights.into(),
        count(tokens),
        small(experts),
        small(top_k),
        flag(renormalize),
    ];
    cuda.launch(&ROUTING, "route", row_per_warp(tokens), &args);
}

pub(crate) fn route_backward(
    cuda: &Cuda,
    router: &Router,
    saved: RouterSaved<'_>,
    dlogits: ViewMut<'_>,
) {
    let Router { experts, top_k, renormalize } = *router;
    let RouterSaved { probs, log_sum, chosen, weights, dweights, balance, z_loss } = saved;
    let tokens = tokens(router, dlogits.len());
    let lens = [probs.len(), log_sum.len(), chosen.len(), weights.len(), dweights.len()];
    let slots = tokens * top_k;
    assert_eq!(lens, [tokens * experts, tokens, slots, slots, slots], "router's results");
    let scope = tokens_per_scope(tokens, balance.len(), experts);
    let args = [
        probs.into(),
        log_sum.into(),
        chosen.into(),
        weights.into(),
        dweights.into(),
        optional(Some(balance).filter(|balance| !balance.is_empty())),
        dlogits.into(),
        count(tokens),
        small(experts),
        small(top_k),
        flag(renormalize),
        count(scope),
        z_loss.into(),
    ];
    cuda.launch(&ROUTING, "route_backward", row_per_warp(tokens), &args);
}

/// Slots grouped by expert.
pub(crate) struct Grouping<'a> {
    pub order: ViewMut<'a>,
    pub starts: ViewMut<'a>,
    pub place: ViewMut<'a>,
}

pub(crate) fn group(
    cuda: &Cuda,
    chosen: View<'_>,
    capacity: Option<Capacity>,
    Grouping { order, starts, place }: Grouping<'_>,
) {
    let (slots, experts) = (chosen.len(), starts.len() - 1);
    assert!(
        order.len() == slots && place.len() == slots,
        "order and place must have {slots} elements"
    );
    check_experts(experts);
    let Capacity { slots: limit, scopes } =
        capacity.unwrap_or(Capacity { slots: usize::MAX, scopes: 1 });
    assert!(slots.is_multiple_of(scopes), "{slots} slots are not a multiple of {scopes} scopes");
    if slots == 0 {
        return cuda.memset(starts.address(), 0, starts.len() * 4);
    }
    // Places that stay empty hold `DROPPED`.
    cuda.memset(order.address(), 0xff, slots * 4);
    let limit = u32::try_from(limit).unwrap_or(u32::MAX);
    let scope = slots / scopes;
    let tile = scope.div_ceil(MAX_TILES).next_multiple_of(32).max(MIN_TILE);
    let per_scope = scope.div_ceil(tile);
    let tiles = scopes * per_scope;
    let scratch = cuda.scratch(2 * tiles * experts * 4);
    let (seen, filled) = (scratch.address(), scratch.address() + (tiles * experts * 4) as u64);
    let grid = Grid::new(tiles, 32).shared(experts * 4);
    let cut = [count(scope), count(tile), count(per_scope), small(experts)];

    let args = [chosen.into(), seen.into(), cut[0], cut[1], cut[2], cut[3]];
    cuda.launch(&ROUTING, "group_count", grid, &args);
    let args = [
        seen.into(),
        filled.into(),
        (&starts).into(),
        count(scopes),
        count(per_scope),
        small(experts),
        limit.into(),
    ];
    cuda.launch(&ROUTING, "group_places", Grid::new(1, 1024), &args);
    let args = [
        chosen.into(),
        seen.into(),
        filled.into(),
        starts.into(),
        order.into(),
        place.into(),
        cut[0],
        cut[1],
        cut[2],
        cut[3],
        limit.into(),
    ];
    cuda.launch(&ROUTING, "group_slots", grid, &args);
}

/// Load statistics, both (scopes, experts).
pub(crate) struct Loads<'a> {
    pub counts: ViewMut<'a>,
    pub sums: ViewMut<'a>,
}

/// Adds the number of slots of each expert to the counts and the sum of its probabilities to the sums.
pub(crate) fn loads(
    cuda: &Cuda,
    experts: usize,
    chosen: View<'_>,
    probs: View<'_>,
    Loads { counts, sums }: Loads<'_>,
) {
    let tokens = probs.len() / experts;
    tokens_per_scope(tokens, counts.len(), experts);
    assert_eq!(counts.len(), sums.len(), "counts and sums must have the same length");
    check_experts(experts);
    let scopes = counts.len() / experts;
    if tokens == 0 || scopes == 0 {
        return;
    }
    let slots = chosen.len() / scopes;
    {
        let n = counts.len();
        let scratch = cuda.scratch(n * 4);
        let numbers = scratch.address();
        cuda.memset(numbers, 0, n * 4);
        let blocks = slots.div_ceil(THREADS as usize * 16).clamp(1, 256);
        let grid = Grid::of([blocks, scopes, 1], THREADS).shared(experts * 4);
        let args = [chosen.into(), numbers.into(), count(slots), small(experts)];
        cuda.launch(&ROUTING, "count_experts", grid, &args);
        let args = [numbers.into(), counts.into(), count(n)];
        cuda.launch(&ROUTING, "add_counts", Grid::over(n, THREADS), &args);
    }
    column_sums_of(cuda, probs, scopes, sums, true);
}

/// Mean of the scopes' balance losses.
pub(crate) fn balance_loss(
    cuda: &Cuda,
    router: &Router,
    counts: View<'_>,
    sums: View<'_>,
) -> Scalar {
    let Router { experts, top_k, .. } = *router;
    assert_eq!(counts.len(), sums.len(), "counts and sums must have the same length");
    let scopes = counts.len() / experts;
    cuda.scalar(|out| {
        let args =
            [counts.into(), sums.into(), out.into(), count(scopes), small(experts), small(top_k)];
        cuda.launch(&ROUTING, "balance_loss", Grid::new(1, 1024), &args);
    })
}

pub(crate) fn balance_gradient(
    cuda: &Cuda,
    router: &Router,
    counts: View<'_>,
    weight: f32,
    gradient: ViewMut<'_>,
) {
    let Router { experts, top_k, .. } = *router;
    assert_eq!(counts.len(), gradient.len(), "counts and gradient must have the same length");
    let grid = Grid::new(counts.len() / experts, 32);
    let args = [counts.into(), gradient.into(), small(experts), small(top_k), weight.into()];
    cuda.launch(&ROUTING, "balance_gradient", grid, &args);
}

/// Copies the row of each slot's token to the slot's place. Empty places get zeros.
pub(crate) fn gather(cuda: &Cuda, x: View<'_>, top_k: usize, order: View<'_>, out: ViewMut<'_>) {
    let places = order.len();
    let Some(dim) = out.len().checked_div(places) else { return };
    assert_eq!(
        (out.len(), out.dtype()),
        (places * dim, x.dtype()),
        "out must have a row for each place"
    );
    let args = [x.into(), order.into(), out.into(), count(places), count(dim), small(top_k)];
    cuda.launch(&ROUTING, float_kernel!("gather", x.dtype()), row_per_warp(places), &args);
}

/// The weighted sum of each token's slots, without dropped ones.
pub(crate) fn combine(
    cuda: &Cuda,
    rows: View<'_>,
    Combine { place, weights, top_k }: Combine<'_>,
    out: ViewMut<'_>,
    accumulate: bool,
) {
    let tokens = place.len() / top_k;
    let Some(dim) = out.len().checked_div(tokens) else { return };
    assert_eq!(
        (out.len(), out.dtype()),
        (tokens * dim, rows.dtype()),
        "out must have a row of {dim} for the tokens of {} slots",
        place.len()
    );
    let args = [
        rows.into(),
        place.into(),
        optional(weights),
        out.into(),
        count(tokens),
        count(dim),
        small(top_k),
        flag(accumulate),
    ];
    cuda.launch(&ROUTING, float_kernel!("combine", rows.dtype()), row_per_warp(tokens), &args);
}

/// Dot product of each row of `a` with the same row of `b`.
pub(crate) fn row_dots(cuda: &Cuda, a: View<'_>, b: View<'_>, out: ViewMut<'_>) {
    let (rows, dim) = (out.len(), a.cols());
    assert!(
        a.len() == b.len() && a.len() == rows * dim && a.dtype() == b.dtype(),
        "a, b and out must have equal numbers of rows of {dim}"
    );
    let args = [a.into(), b.into(), out.into(), count(rows), count(dim)];
    cuda.launch(&ROUTING, float_kernel!("row_dots", a.dtype()), row_per_warp(rows), &args);
}

/// Multiplies each row by its factor.
pub(crate) fn scale_rows(cuda: &Cuda, rows: ViewMut<'_>, factors: View<'_>) {
    let (n, dim) = (factors.len(), rows.cols());
    assert_eq!(rows.len(), n * dim, "there must be one factor for each row of {dim}");
    let (kernel, grid) =
        (float_kernel!("scale_rows", rows.dtype()), vectors(rows.len(), rows.dtype(), 2));
    let args = [rows.into(), factors.into(), count(n), count(dim)];
    cuda.launch(&ROUTING, kernel, grid, &args);
}

fn tokens(router: &Router, logits: usize) -> usize {
    let Router { experts, top_k, .. } = *router;
    assert!(top_k > 0 && top_k <= experts, "top_k={top_k} must be between 1 and {experts} experts");
    assert!(
        logits.is_multiple_of(experts),
        "{logits} logits are not a multiple of {experts} experts"
    );
    logits / experts
}

/// Tokens per scope, if `len` numbers hold `experts` for each scope.
fn tokens_per_scope(tokens: usize, len: usize, experts: usize) -> usize {
    assert!(len.is_multiple_of(experts), "{len} numbers are not a multiple of {experts} experts");
    let scopes = (len / experts).max(1);
    assert!(tokens.is_multiple_of(scopes), "{tokens} tokens are not a multiple of {scopes} scopes");
    (tokens / scopes).max(1)
}

fn check_experts(experts: usize) {
    assert!(experts <= MAX_EXPERTS, "{experts} experts exceed the limit of {MAX_EXPERTS} on a GPU");
}
