//! A rank's part of a model as a list of blocks, and the passes of micro-batches through its stages.

use std::cell::RefCell;
use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Tag, Tensor, View};
use lockstep_parallel::trace::{SpanGuard, SpanKind};
use lockstep_parallel::{Gradients, Groups, Store, Weights};
use lockstep_plan::Recompute;
use lockstep_plan::model::{Part, Shape};
use lockstep_plan::reduction::PassKind;

use crate::activations::DeferredBlock;
use crate::{
    Activations, Auxiliary, Batch, Block, Ctx, Dropout, ExpertLoads, Fp8, Loss, Offloading,
    PendingLoss, Slot, Transformer, WeightGrads,
};

/// The blocks of a rank. Parameters are stored elsewhere, in [`Weights`].
pub struct Model {
    pub part: Part,
    /// One for each of `part.blocks`.
    pub(crate) blocks: Vec<Box<dyn Block>>,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest sequence.
    pub seq: usize,
}

/// Settings of a pass.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    pub device: &'a Device,
    pub groups: &'a Groups,
    /// Type of activations.
    pub dtype: Dtype,
    pub recompute: Recompute,
    pub dropout: Option<Dropout>,
    /// Tokens of the global batch. Gradients are those of the mean over them.
    pub global_tokens: usize,
    /// Loads of the experts in the step. Needed for a balance loss over the global batch (`Balance::Batch`).
    pub loads: Option<&'a ExpertLoads>,
    pub offload: Offloading<'a>,
    /// Multiply in fp8. Inference computes in `dtype`.
    pub fp8: Option<Fp8<'a>>,
}

/// The pass of one micro-batch through one of the rank's stages.
#[derive(Clone, Copy)]
pub struct StagePass<'a> {
    /// Index among the rank's stages.
    pub stage: usize,
    pub pass: &'a Pass<'a>,
    pub batch: &'a Batch,
    /// Whether `backward` leaves weight gradients to `Model::deferred_weight_grads`. Those of norms, of the embedding
    /// and of the head are always computed immediately.
    pub defer_weight_grads: bool,
}

/// A shared parameter whose gradient a block has written before the block that owns it.
struct SharedGradient {
    owner: usize,
    range: Range<usize>,
    /// Whether the owner's gradient holds that of an earlier micro-batch.
    accumulate: bool,
}

impl Pass<'_> {
    /// Opens the span of a block's pass, and records the memory in use.
    fn block_span(&self, name: &'static str, block: usize) -> SpanGuard<'_> {
        let tracer = self.groups.tracer();
        tracer.memory(|| {
            let memory = self.device.memory();
            Tag::ALL.iter().map(|tag| memory.of(*tag).now as u64).collect()
        });
        tracer.block(SpanKind::Block, name, block)
    }
}

impl Model {
    /// A model of a built-in family, on the rank that holds `part`.
    pub fn new(shape: &Shape, part: &Part) -> Model {
        let transformer = Transformer::new(shape, part);
        let blocks = part.blocks.iter().map(|params| transformer.block(params)).collect();
        Model::from_blocks(part.clone(), blocks, shape.vocab, shape.seq)
    }

    /// A whole model of a built-in family on one rank.
    pub fn whole(shape: &Shape) -> Model {
        Model::new(shape, &Part::whole(shape.blocks()))
    }

    /// A model of any blocks, one for each of `part.blocks`.
    ///
    /// # Panics
    /// If a block does not have the parameters that the part lists for it, or shares one with a block of another stage.
    pub fn from_blocks(part: Part, blocks: Vec<Box<dyn Block>>, vocab: usize, seq: usize) -> Model {
        assert_eq!(blocks.len(), part.blocks.len(), "one block for each parameter list");
        for (block, params) in blocks.iter().zip(&part.blocks) {
            assert!(block.params() == params, "block {} has other parameters", params.name);
        }
        for (block, shared) in part.shared.iter().enumerate() {
            let Some(owner) = shared.as_ref().map(|shared| shared.block) else { continue };
            let stage = part.stages.iter().find(|stage| stage.contains(&block));
            let same = stage.is_some_and(|stage| stage.contains(&owner));
            assert!(same, "{} shares a parameter across stages", part.blocks[block].name);
        }
        Model { part, blocks, vocab, seq }
    }

    /// Forward and backward pass of one micro-batch through a whole model. Its gradients are added to those of earlier
    /// micro-batches of the step.
    pub fn train(
        &self,
        pass: &Pass<'_>,
        batch: &Batch,
        store: &mut Store,
        activations: &mut Activations,
    ) -> Loss {
        self.assert_whole();
        let at = StagePass { stage: 0, pass, batch, defer_weight_grads: false };
        self.forward(&at, None, &mut store.weights, activations);
        self.backward(&at, None, store, activations).1.wait()
    }

    /// The forward pass of a stage, from the output of the previous stage. The last stage returns nothing: its loss is
    /// computed in the backward pass.
    pub fn forward(
        &self,
        at: &StagePass<'_>,
        x: Option<Tensor>,
        weights: &mut Weights,
        activations: &mut Activations,
    ) -> Option<Tensor> {
        let stage = self.part.stages[at.stage].clone();
        activations.begin(stage.len());
        let mut x = self.stage_input(at, x);
        for block in stage.clone() {
            if self.part.is_last(block) {
                activations.last_input = Some(x);
                return None;
            }
            let _span = at.pass.block_span("forward", block);
            self.gather(at.pass, weights, block, PassKind::Forward);
            let cx = self.ctx(at, Some(&activations.auxiliary), weights, block);
            let saved = &mut activations.saved[block - stage.start];
            x = self.blocks[block].forward(&cx, x, saved);
            self.release(weights, block, PassKind::Forward);
            if at.pass.offload.activations {
                activations.movement.release(at.pass.device);
                if self.part.offloads(block) {
                    activations.movement.leave(at.pass.device, &*self.blocks[block], saved);
                }
            }
        }
        Some(x)
    }

    /// The backward pass of a stage, from the gradient of its output to that of its input. The last stage takes no
    /// gradient and returns the loss; the first returns no gradient.
    pub fn backward(
        &self,
        at: &StagePass<'_>,
        dy: Option<Tensor>,
        store: &mut Store,
        activations: &mut Activations,
    ) -> (Option<Tensor>, PendingLoss) {
        let (device, groups) = (at.pass.device, at.pass.groups);
        let Activations { saved, last_input, auxiliary, deferred, movement } = activations;
        let stage = self.part.stages[at.stage].clone();
        let (mut dx, mut losses, mut written) = (dy, None, None);
        for block in stage.clone().rev() {
            let _span = at.pass.block_span("backward", block);
            let code = &self.blocks[block];
            let kind = if self.part.is_last(block) { PassKind::Loss } else { PassKind::Backward };
            if code.backward_reads_weights() {
                self.gather(at.pass, &mut store.weights, block, kind);
            }
            if at.pass.offload.activations {
                movement.arrive(device);
                let before = block.checked_sub(1).filter(|before| stage.contains(before));
                if let Some(before) = before.filter(|before| self.part.offloads(*before)) {
                    let saved = &mut saved[before - stage.start];
                    movement.fetch(device, &*self.blocks[before], saved);
                }
            }
            let mut work = Vec::new();
            let mut grads = self.weight_grads(device, &mut store.gradients, block, &mut written);
            if at.defer_weight_grads {
                grads = grads.deferring(&mut work);
            }
            let cx = self.ctx(at, Some(auxiliary), &store.weights, block);
            dx = if self.part.is_last(block) {
                let x = last_input.take().expect("the forward pass saved the last block's input");
                let (of_tokens, dx) = code.loss_and_backward(&cx, x, &mut grads);
                losses = Some(of_tokens);
                dx
            } else {
                let dy = dx.take().expect("the next block returned the gradient of its input");
                code.backward(&cx, &mut saved[block - stage.start], dy, &mut grads)
            };
            self.release(&mut store.weights, block, kind);
            match work.is_empty() {
                true => store.complete(device, groups, block),
                false => deferred.push(DeferredBlock { block, work }),
            }
        }
        let mut loss = PendingLoss::of(device, losses);
        let auxiliary = auxiliary.borrow();
        loss.rest.auxiliary = auxiliary.loss();
        loss.rest.dropped = auxiliary.dropped;
        (dx, loss)
    }

    /// Computes the weight gradients that `backward` deferred.
    pub fn deferred_weight_grads(
        &self,
        pass: &Pass<'_>,
        store: &mut Store,
        activations: &mut Activations,
    ) {
        for DeferredBlock { block, work } in activations.deferred.drain(..) {
            let _span = pass.block_span("weight gradients", block);
            for deferred in work {
                let (grads, _) = store.gradients.block(pass.device, block);
                deferred.run(pass.device, grads);
            }
            store.complete(pass.device, pass.groups, block);
        }
    }

    /// The forward pass of a stage without saving activations. The last stage returns the loss of each token
    /// (1, tokens), or the logits (tokens, vocab) if the batch has no targets. `observe` is called with the output of
    /// every block but the last.
    pub fn infer(
        &self,
        at: &StagePass<'_>,
        x: Option<Tensor>,
        weights: &mut Weights,
        observe: &mut dyn FnMut(usize, &Tensor),
    ) -> Tensor {
        let pass = &Pass { dropout: None, recompute: Recompute::Full, fp8: None, ..*at.pass };
        let at = &StagePass { pass, ..*at };
        let stage = self.part.stages[at.stage].clone();
        let mut x = self.stage_input(at, x);
        let mut saved = Slot::default();
        for block in stage.clone() {
            let _span = pass.block_span("inference", block);
            self.gather(pass, weights, block, PassKind::Inference);
            let cx = self.ctx(at, None, weights, block);
            x = self.blocks[block].forward(&cx, x, &mut saved);
            saved.clear();
            self.release(weights, block, PassKind::Inference);
            if !self.part.is_last(block) {
                observe(block, &x);
            }
        }
        x
    }

    pub(crate) fn assert_whole(&self) {
        let whole = self.part.stages.len() == 1 && self.blocks.len() == self.part.total_blocks;
        assert!(whole, "this rank holds only a part of the model");
    }

    /// Token ids for the first stage, the output of the previous stage for the others.
    fn stage_input(&self, at: &StagePass<'_>, x: Option<Tensor>) -> Tensor {
        match self.part.is_first(self.part.stages[at.stage].start) {
            true => at.batch.inputs.clone(),
            false => x.expect("the previous stage sent its output"),
        }
    }

    /// Gathers the parameters of a block and the one that it shares.
    fn gather(&self, pass: &Pass<'_>, weights: &mut Weights, block: usize, kind: PassKind) {
        let shared = self.part.shared[block].as_ref();
        if let Some(updates) = pass.offload.updates {
            updates.apply(pass.device, weights, block);
            shared.iter().for_each(|shared| updates.apply(pass.device, weights, shared.block));
        }
        weights.gather(pass.device, pass.groups, block, kind);
        if let Some(shared) = shared {
            // The block that owns it prefetches for its own passes only.
            weights.gather(pass.device, pass.groups, shared.block, PassKind::Loss);
        }
    }

    fn release(&self, weights: &mut Weights, block: usize, kind: PassKind) {
        weights.release(block, kind);
        if let Some(shared) = &self.part.shared[block] {
            weights.release(shared.block, kind);
        }
    }

    /// Where a block's backward pass puts its weight gradients. A block that shares a parameter writes its gradient
    /// before the owner does; `written` carries this to the owner.
    fn weight_grads<'a>(
        &self,
        device: &'a Device,
        gradients: &'a mut Gradients,
        block: usize,
        written: &mut Option<SharedGradient>,
    ) -> WeightGrads<'a> {
        if let Some(shared) = &self.part.shared[block] {
            let (owner, range) = (shared.block, shared.range.clone());
            let ((place, accumulate), (own, own_accumulate)) = gradients.two(device, owner, block);
            let place = place.part(range.clone()).shaped(shared.rows, shared.cols);
            *written = Some(SharedGradient { owner, range, accumulate });
            let grads = WeightGrads::new(device, own, own_accumulate);
            return grads.with_shared(place, accumulate);
        }
        let (own, accumulate) = gradients.block(device, block);
        match written.take_if(|written| written.owner == block) {
            Some(SharedGradient { range, accumulate, .. }) => {
                WeightGrads::new(device, own, accumulate).with_written(range)
            }
            None => WeightGrads::new(device, own, accumulate),
        }
    }

    pub(crate) fn ctx<'a>(
        &self,
        at: &StagePass<'a>,
        auxiliary: Option<&'a RefCell<Auxiliary>>,
        weights: &'a Weights,
        block: usize,
    ) -> Ctx<'a> {
        let StagePass { pass, batch, .. } = *at;
        let shared = self.part.shared[block].as_ref();
        let shared = shared.map(|shared| {
            let owner = weights.block(shared.block);
            owner.part(shared.range.clone()).shaped(shared.rows, shared.cols)
        });
        Ctx {
            device: pass.device,
            groups: pass.groups,
            weights: weights.get(block).unwrap_or(View::of::<f32>(&[])),
            shared,
            dtype: pass.dtype,
            recompute: pass.recompute,
            batch: batch.batch,
            runs: &batch.runs,
            inputs: batch.inputs.view(),
            targets: batch.targets.as_ref().map(Tensor::view),
            loss_scale: 1.0 / pass.global_tokens as f32,
            dropout: pass.dropout,
            share: batch.tokens() as f32 / pass.global_tokens as f32,
            auxiliary,
            loads: pass.loads,
            fp8: pass.fp8,
            recomputing: false,
        }
    }
}
