//! The block: the unit that is bucketed, gathered and released, recomputed, and placed on a pipeline stage.

use lockstep_kernels::{Tag, Tensor};
use lockstep_plan::model::BlockParams;

use crate::{Ctx, Slot, WeightGrads};

/// A part of a model with explicit forward and backward passes.
///
/// A model is a list of blocks. The first block gets the token ids (1, tokens); the blocks after it get and return the
/// residual stream (tokens, dim); the last block returns the loss of each token (1, tokens). A block stores no
/// parameters: [`Ctx::weights`] is their flat buffer in the order of `params`, valid for one call, because ZeRO-3
/// gathers and releases it in between.
///
/// The built-in blocks are made by [`Transformer`](crate::Transformer). This adds one of our own between two of them,
/// x + W·x:
///
/// ```
/// use lockstep_kernels::{Device, Matmul, Tag, Tensor};
/// use lockstep_model::{Block, Ctx, Model, Slot, Transformer, WeightGrads};
/// use lockstep_plan::model::{BlockParams, Param, Part, Split};
/// use lockstep_plan::presets;
///
/// struct Adapter {
///     params: BlockParams,
/// }
///
/// impl Block for Adapter {
///     fn params(&self) -> &BlockParams {
///         &self.params
///     }
///
///     fn forward(&self, cx: &Ctx<'_>, x: Tensor, saved: &mut Slot) -> Tensor {
///         let weight = cx.weights.shaped(x.cols(), x.cols());
///         let mut y = cx.saved(x.rows(), x.cols());
///         let product = Matmul::linear(x.view(), weight, y.view_mut());
///         cx.device.matmul(Matmul { residual: Some(x.view()), ..product });
///         saved.put(x);
///         y
///     }
///
///     fn backward(
///         &self,
///         cx: &Ctx<'_>,
///         saved: &mut Slot,
///         dy: Tensor,
///         grads: &mut WeightGrads<'_>,
///     ) -> Option<Tensor> {
///         let x: Tensor = saved.take();
///         grads.weight(self.params.range("weight"), &dy, &x);
///         let weight = cx.weights.shaped(x.cols(), x.cols());
///         let mut dx = cx.scratch(x.rows(), x.cols());
///         cx.device.matmul(Matmul::linear_dx(dy.view(), weight, dx.view_mut()));
///         cx.device.add(dx.view_mut(), dy.view());
///         Some(dx)
///     }
/// }
///
/// let shape = presets::shape("llama-test", Some(64)).unwrap();
/// let mut lists = shape.blocks();
/// let weight = Param::matrix("weight", [shape.dim, shape.dim], 0.02, Split::Norm);
/// lists.insert(2, BlockParams::new("adapter", vec![weight]));
/// let part = Part::whole(lists);
/// let transformer = Transformer::new(&shape, &part);
/// let blocks = part.blocks.iter().map(|params| match params.name.as_str() {
///     "adapter" => Box::new(Adapter { params: params.clone() }) as Box<dyn Block>,
///     _ => transformer.block(params),
/// });
/// let model = Model::from_blocks(part.clone(), blocks.collect(), shape.vocab, shape.seq);
/// assert_eq!(model.part.blocks[2].len(), shape.dim * shape.dim);
/// ```
pub trait Block: Send + Sync {
    /// Names, shapes and order of the parameters in the flat buffer on this rank.
    fn params(&self) -> &BlockParams;

    /// Computes the output from the input and saves what `backward` needs, less what `cx.recompute` recomputes.
    fn forward(&self, cx: &Ctx<'_>, x: Tensor, saved: &mut Slot) -> Tensor;

    /// Computes the gradient of the input from that of the output; the first block of a model returns `None`.
    /// Gradients of the weights go to `grads`, which computes or defers them.
    fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: &mut Slot,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Option<Tensor>;

    /// Forward and backward pass of the last block of a model: returns the loss of each token and the gradient of the
    /// input. Override it to fuse the two passes.
    fn loss_and_backward(
        &self,
        cx: &Ctx<'_>,
        x: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> (Tensor, Option<Tensor>) {
        let mut saved = Slot::default();
        let losses = self.forward(cx, x, &mut saved);
        let (rows, cols) = (losses.rows(), losses.cols());
        let mut dlosses = cx.device.empty(rows, cols, losses.dtype(), Tag::Buffers);
        cx.device.fill(dlosses.view_mut(), cx.loss_scale);
        let dx = self.backward(cx, &mut saved, dlosses, grads);
        (losses, dx)
    }

    /// Computes the output for tokens that follow those in the cache, and adds them to it. The default is for blocks
    /// that process each token by itself.
    fn extend(&self, cx: &Ctx<'_>, x: Tensor, _cache: &mut Slot) -> Tensor {
        self.forward(cx, x, &mut Slot::default())
    }

    /// Calls `visit` with each tensor that `forward` has saved. Offloading moves them to host memory and back. The default
    /// visits none, so activations stay on the device.
    fn saved_tensors(&self, _saved: &mut Slot, _visit: &mut dyn FnMut(&mut Tensor)) {}

    /// Whether `backward` reads the weights. If not, ZeRO-3 does not gather them for it.
    fn backward_reads_weights(&self) -> bool {
        true
    }
}
