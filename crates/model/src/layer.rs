//! A transformer layer: attention, then feed-forward, each added to the residual stream.

use std::sync::Arc;

use lockstep_kernels::{RopeTable, Tensor};
use lockstep_parallel::trace::SpanKind;
use lockstep_plan::Recompute;
use lockstep_plan::model::{BlockParams, Shape};

use crate::attention::{AttentionPart, SavedAttention};
use crate::feed_forward::{FeedForward, SavedFeedForward};
use crate::{Block, Ctx, Slot, WeightGrads};

/// The layer of all built-in families, which differ in parameters and feed-forward.
pub(crate) struct Layer {
    params: BlockParams,
    attention: AttentionPart,
    feed_forward: FeedForward,
}

// Not boxed: a steady step allocates nothing.
#[allow(clippy::large_enum_variant)]
enum SavedLayer {
    /// The input alone, with full recompute.
    Input(Tensor), // (tokens, dim)
    Inside(SavedAttention, SavedFeedForward),
}

impl Layer {
    /// `shape` is this rank's.
    pub fn new(shape: &Shape, params: BlockParams, rope: Option<Arc<RopeTable>>) -> Layer {
        // Site 0 belongs to the embedding, which is block 0.
        let site = 2 * params.number as u64 - 1;
        Layer {
            attention: AttentionPart::new(shape, &params, rope, site),
            feed_forward: FeedForward::new(shape, &params, site + 1),
            params,
        }
    }
}

impl Block for Layer {
    fn params(&self) -> &BlockParams {
        &self.params
    }

    fn forward(&self, cx: &Ctx<'_>, x: Tensor, saved: &mut Slot) -> Tensor {
        let (middle, attention) = self.attention.forward(cx, x);
        let save_hidden = cx.recompute.saves_hidden();
        let (y, feed_forward) = self.feed_forward.forward(cx, middle, save_hidden);
        saved.put(match cx.recompute {
            Recompute::Full => SavedLayer::Input(attention.x),
            _ => SavedLayer::Inside(attention, feed_forward),
        });
        y
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor> {
        let (attention, feed_forward) = match saved.take() {
            SavedLayer::Inside(attention, feed_forward) => (attention, feed_forward),
            SavedLayer::Input(x) => {
                let _span = cx.groups.tracer().span(SpanKind::Recompute, "recompute");
                let cx = &Ctx { recomputing: true, ..*cx };
                let (middle, attention) = self.attention.forward(cx, x);
                (attention, self.feed_forward.hidden(cx, middle, true).1)
            }
        };
        let of = (dy, self.attention.bias_in_stream(cx));
        let dmiddle = self.feed_forward.backward(cx, feed_forward, of, grads);
        Some(self.attention.backward(cx, attention, dmiddle, grads))
    }

    fn saved_tensors(&self, saved: &mut Slot, visit: &mut dyn FnMut(&mut Tensor)) {
        match saved.get_mut::<SavedLayer>() {
            Some(SavedLayer::Input(x)) => visit(x),
            Some(SavedLayer::Inside(attention, feed_forward)) => {
                attention.tensors(visit);
                feed_forward.tensors(visit);
            }
            None => {}
        }
    }

    fn extend(&self, cx: &Ctx<'_>, x: Tensor, cache: &mut Slot) -> Tensor {
        let middle = self.attention.extend(cx, &x, cache);
        self.feed_forward.forward(cx, middle, false).0
    }
}
