//! The second half of a layer: x + feed_forward(norm(x)), dense or with a mixture of experts.

use std::ops::Range;

use lockstep_kernels::{Fp8Tensor, Tensor};
use lockstep_parallel::trace::SpanKind;
use lockstep_plan::model::{BlockParams, Family, Shape};

use crate::dense::{Dense, Fp8Hidden, SavedHidden};
use crate::moe::{Experts, ExpertsBackward, ExpertsHidden, SavedExperts};
use crate::norm::{Norm, NormBackward, SavedNorm};
use crate::residual::{ProjectionInput, add_projection, projection_gradient};
use crate::{Ctx, WeightGrads};

pub(crate) struct FeedForward {
    norm: Norm,
    inner: Inner,
    /// Dropout site.
    site: u64,
}

enum Inner {
    Dense(Dense),
    Experts(Box<Experts>),
}

/// Activations saved for the backward pass.
pub(crate) struct SavedFeedForward {
    x: Tensor, // (tokens, dim)
    norm: SavedNorm,
    inner: SavedInner,
}

impl SavedFeedForward {
    /// Calls `visit` with all tensors of a dense feed-forward. Those of experts stay where they are.
    pub fn tensors(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        let SavedFeedForward { x, norm, inner } = self;
        visit(x);
        norm.tensors(visit);
        if let SavedInner::Dense(Some(hidden)) = inner {
            visit(&mut hidden.before);
            hidden.after.iter_mut().for_each(visit);
        }
    }
}

// Not boxed: a steady step allocates nothing.
#[allow(clippy::large_enum_variant)]
enum SavedInner {
    /// None if all of it is recomputed.
    Dense(Option<SavedHidden>),
    Fp8(Option<Fp8Hidden>),
    Experts(SavedExperts),
}

/// The hidden values after the activation.
pub(crate) enum Hidden {
    Dense(Tensor),  // (tokens, ffn)
    Fp8(Fp8Tensor), // (tokens, ffn)
    Experts(ExpertsHidden),
}

impl FeedForward {
    pub fn new(shape: &Shape, params: &BlockParams, site: u64) -> FeedForward {
        let inner = match (shape.family, shape.moe) {
            (Family::Moe, Some(moe)) => Inner::Experts(Box::new(Experts::new(shape, moe, params))),
            (Family::Gpt2, _) => Inner::Dense(Dense::gelu(params, "mlp")),
            _ => Inner::Dense(Dense::swiglu(params, "mlp")),
        };
        FeedForward { norm: Norm::new(params, "norm2", shape.norm_eps), inner, site }
    }

    /// `save_hidden` is false if the backward pass recomputes the hidden values.
    pub fn forward(
        &self,
        cx: &Ctx<'_>,
        x: Tensor,
        save_hidden: bool,
    ) -> (Tensor, SavedFeedForward) {
        let (hidden, saved) = self.hidden(cx, x, save_hidden);
        let y = match (&self.inner, &hidden, &saved.inner) {
            (Inner::Dense(dense), Hidden::Dense(hidden), _) => {
                let input = ProjectionInput::Whole(hidden.view());
                add_projection(cx, self.site, &dense.down, input, &saved.x)
            }
            (Inner::Dense(dense), Hidden::Fp8(hidden), _) => {
                let input = ProjectionInput::Fp8(hidden);
                add_projection(cx, self.site, &dense.down, input, &saved.x)
            }
            (Inner::Experts(experts), Hidden::Experts(hidden), SavedInner::Experts(inner)) => {
                experts.project(cx, hidden, inner, &saved.x)
            }
            _ => unreachable!("a feed-forward saves activations of its own kind"),
        };
        (y, saved)
    }

    /// The forward pass without the last projection.
    pub fn hidden(&self, cx: &Ctx<'_>, x: Tensor, save_hidden: bool) -> (Hidden, SavedFeedForward) {
        let fp8 = cx.fp8.is_some() && matches!(self.inner, Inner::Dense(_));
        let (normed, norm) = self.norm.forward(cx, &x, cx.keeps_cheap() && !fp8);
        let (hidden, inner) = match &self.inner {
            Inner::Dense(dense) if fp8 => {
                let (hidden, saved) = dense.fp8_hidden(cx, &normed, save_hidden);
                (Hidden::Fp8(hidden), SavedInner::Fp8(saved))
            }
            Inner::Dense(dense) => {
                let normed = cx.groups.start_gather_sequence(cx.device, normed);
                let (hidden, saved) = dense.hidden(cx, normed, save_hidden);
                (Hidden::Dense(hidden), SavedInner::Dense(saved))
            }
            Inner::Experts(experts) => {
                let normed = cx.groups.gather_sequence(cx.device, normed);
                let (hidden, saved) = experts.hidden(cx, &normed, save_hidden);
                (Hidden::Experts(hidden), SavedInner::Experts(saved))
            }
        };
        (hidden, SavedFeedForward { x, norm, inner })
    }

    /// The gradient of the input from that of the output. `bias_before` is that of the projection before, if its gradient
    /// is the sum of the columns of the returned one.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: SavedFeedForward,
        (dy, bias_before): (Tensor, Option<Range<usize>>),
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let SavedFeedForward { x, mut norm, inner } = saved;
        let mut normed = || self.norm.output(cx, &x, &mut norm);
        let dnormed = match (&self.inner, inner) {
            (Inner::Dense(dense), SavedInner::Dense(saved)) => {
                let dprojected = projection_gradient(cx, self.site, &dy);
                let mut normed = || cx.groups.start_gather_sequence(cx.device, normed());
                let saved = saved.unwrap_or_else(|| {
                    let _span = cx.groups.tracer().span(SpanKind::Recompute, "recompute");
                    dense.recompute(cx, normed())
                });
                let dbefore = dense.backward(cx, saved, dprojected, grads);
                dense.up.backward(cx, normed(), dbefore, grads)
            }
            (Inner::Dense(dense), SavedInner::Fp8(saved)) => {
                let dprojected = projection_gradient(cx, self.site, &dy).wait();
                let saved = saved.unwrap_or_else(|| {
                    let _span = cx.groups.tracer().span(SpanKind::Recompute, "recompute");
                    dense.fp8_recompute(cx, &normed())
                });
                dense.fp8_backward(cx, saved, normed, &dprojected, grads)
            }
            (Inner::Experts(experts), SavedInner::Experts(saved)) => {
                let dprojected = cx.groups.reduce_output_backward(cx.device, dy.clone());
                let normed = cx.groups.gather_sequence(cx.device, normed());
                let of = ExpertsBackward { normed: &normed, dy: &dprojected };
                let dnormed = experts.backward(cx, saved, of, grads);
                cx.groups.gather_sequence_backward(cx.device, dnormed)
            }
            _ => unreachable!("a feed-forward saves activations of its own kind"),
        };
        let mut dx = cx.writable(dy);
        let (dy, of_x) = (dnormed.view(), dx.view_mut());
        let of = NormBackward { x: &x, stats: &norm.stats, dy, dx: of_x, bias_before };
        self.norm.backward(cx, of, grads);
        dx
    }
}
