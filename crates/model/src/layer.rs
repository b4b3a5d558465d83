//! A transformer layer: attention, then feed-forward, each around the residual stream.

use std::sync::Arc;

use lockstep_kernels::{RopeTable, Tensor, View};
use lockstep_plan::Recompute;
use lockstep_plan::model::{BlockParams, Shape};

use crate::attention::{AttentionPart, AttentionSaved};
use crate::feed_forward::{FeedForward, FeedForwardSaved};
use crate::{Block, Ctx, WeightGrads};

/// The block of all three families: what differs are its parameters and its second half.
pub struct Layer {
    params: BlockParams,
    pub(crate) attention: AttentionPart,
    pub(crate) feed_forward: FeedForward,
}

/// What a layer's backward pass needs.
pub struct Saved {
    x: Tensor, // (tokens, dim)
    /// Absent when the whole layer is computed again.
    inside: Option<Inside>,
}

struct Inside {
    attention: AttentionSaved,
    middle: Tensor, // (tokens, dim), the stream between the halves
    feed_forward: FeedForwardSaved,
}

impl Layer {
    /// Of a rank's piece of a model.
    pub fn new(shape: &Shape, params: BlockParams, rope: Option<Arc<RopeTable>>) -> Layer {
        // Site 0 is the embedding's, which is block 0.
        let site = 2 * params.number as u64 - 1;
        Layer {
            attention: AttentionPart::new(shape, &params, rope, site),
            feed_forward: FeedForward::new(shape, &params, site + 1),
            params,
        }
    }
}

impl Block for Layer {
    type Saved = Saved;

    fn params(&self) -> &BlockParams {
        &self.params
    }

    fn forward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: Tensor,
        recompute: Recompute,
    ) -> (Tensor, Saved) {
        let (middle, attention) = self.attention.forward(cx, weights, &x);
        let (y, feed_forward) =
            self.feed_forward.forward(cx, weights, &middle, recompute == Recompute::None);
        let inside = Inside { attention, middle, feed_forward };
        (y, Saved { x, inside: (recompute != Recompute::Full).then_some(inside) })
    }

    fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        saved: Saved,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let Saved { x, inside } = saved;
        let Inside { attention, middle, feed_forward } = inside.unwrap_or_else(|| {
            let cx = &Ctx { counting: false, ..*cx };
            let (middle, attention) = self.attention.forward(cx, weights, &x);
            let (_, feed_forward) = self.feed_forward.inside(cx, weights, &middle, true);
            Inside { attention, middle, feed_forward }
        });
        let dmiddle = self.feed_forward.backward(cx, weights, &middle, feed_forward, dy, grads);
        drop(middle);
        self.attention.backward(cx, weights, &x, attention, dmiddle, grads)
    }
}
