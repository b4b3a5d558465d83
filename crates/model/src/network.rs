//! A rank's piece of a model: its stages, each a run of blocks, and how micro-batches go through them.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use lockstep_kernels::{Device, Dtype, RopeScaling, RopeTable, Tensor, View};
use lockstep_parallel::{Groups, Store, Weights};
use lockstep_plan::Recompute;
use lockstep_plan::model::{Family, Part, Shape};

use crate::embed::Embed;
use crate::head::{Head, OutputGradient};
use crate::{Auxiliary, Batch, Block, Ctx, Deferred, Dropout, Layer, Saved, WeightGrads};

/// The code of a model: what to do with parameters that lie elsewhere.
pub struct Model {
    pub part: Part,
    /// Vocabulary size.
    pub vocab: usize,
    /// Longest sequence.
    pub seq: usize,
    /// (vocab, dim) of the output projection on this rank.
    output_dims: (usize, usize),
    pub(crate) stages: Vec<Stage>,
}

/// A run of blocks that micro-batches go through at one go.
pub(crate) struct Stage {
    /// Their numbers on this rank.
    pub blocks: Range<usize>,
    pub embed: Option<Embed>,
    pub layers: Vec<Layer>,
    pub head: Option<Head>,
}

/// What a micro-batch lost.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loss {
    /// Cross-entropy in nats, summed over the tokens.
    pub sum: f64,
    /// Those of the micro-batch, whose number the mean divides by: also the ones whose target counts for
    /// nothing.
    pub tokens: usize,
    /// Load balancing and z-loss of this stage's routers, weighted as they enter the objective: the mean for
    /// the tokens here, over all layers of the model.
    pub auxiliary: f64,
}

/// How a pass is done.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    pub device: &'a Device,
    pub groups: &'a Groups,
    /// Of activations.
    pub dtype: Dtype,
    pub recompute: Recompute,
    pub dropout: Option<Dropout>,
    /// Tokens of the whole global batch: gradients are those of the mean over them.
    pub global_tokens: usize,
}

/// What a stage's backward pass needs of its forward pass.
#[derive(Default)]
pub struct Activations {
    saved: Vec<Saved>,
    /// The head's input.
    x: Option<Tensor>,
    /// What the routers did.
    pub auxiliary: RefCell<Auxiliary>,
    /// Gradients of weights that were put off.
    later: Vec<Later>,
}

/// A block's.
struct Later {
    block: usize,
    /// Whether an earlier micro-batch has been at its gradient.
    accumulate: bool,
    work: Vec<Deferred>,
}

/// When gradients of weights are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WeightGradients {
    /// Along with those of the activations.
    Now,
    /// By `Model::weight_gradients`. Those of norms, of the embedding and of the head are computed at once.
    Later,
}

impl Model {
    /// The blocks of a rank's piece, and the tables they share.
    pub fn new(shape: &Shape, part: &Part) -> Model {
        let scaling = shape.rope_scaling.map(|scaling| RopeScaling {
            factor: scaling.factor,
            low_freq_factor: scaling.low_freq_factor,
            high_freq_factor: scaling.high_freq_factor,
            original_positions: scaling.original_seq,
        });
        let rope = (shape.family != Family::Gpt2).then(|| {
            Arc::new(RopeTable::new(shape.head_dim, shape.seq, shape.rope_theta, scaling))
        });
        let stage = |blocks: &Range<usize>| Stage::new(shape, part, blocks.clone(), rope.as_ref());
        let output_dims = (shape.vocab_on_rank(&part.mesh, part.coord).len(), shape.dim);
        let stages = part.stages.iter().map(stage).collect();
        Model { stages, part: part.clone(), vocab: shape.vocab, seq: shape.seq, output_dims }
    }

    /// All of a model on one rank.
    pub fn whole(shape: &Shape) -> Model {
        Model::new(shape, &Part::whole(shape.blocks()))
    }

    /// Forward and backward of one micro-batch through a whole model: its gradients are added to what earlier
    /// micro-batches of the step left.
    pub fn train(
        &self,
        pass: &Pass<'_>,
        batch: &Batch,
        store: &mut Store,
        activations: &mut Activations,
    ) -> Loss {
        assert!(self.stages.len() == 1 && self.part.has_head(), "the whole model is on this rank");
        self.forward(0, pass, batch, None, &mut store.weights, activations);
        self.backward(0, pass, batch, None, store, activations, WeightGradients::Now).1
    }

    /// A stage's forward pass, from what the stage before it gave. The last stage gives nothing: its loss is
    /// computed at the beginning of the backward pass.
    pub fn forward(
        &self,
        stage: usize,
        pass: &Pass<'_>,
        batch: &Batch,
        x: Option<Tensor>,
        weights: &mut Weights,
        activations: &mut Activations,
    ) -> Option<Tensor> {
        let Stage { blocks, embed, layers, head } = &self.stages[stage];
        activations.auxiliary.get_mut().clear();
        let cx = self.cx(pass, batch, Some(&activations.auxiliary));
        let mut x = self.embedded(&cx, batch, x, embed.as_ref(), blocks, weights);
        for (block, layer) in layer_blocks(embed, blocks).zip(layers) {
            let next = Some(block + 1).filter(|next| blocks.contains(next));
            weights.gather(pass.device, pass.groups, block, next);
            let (y, saved) = layer.forward(&cx, weights.block(block), x, pass.recompute);
            weights.release(block, true);
            activations.saved.push(saved);
            x = y;
        }
        if head.is_none() {
            return Some(x);
        }
        activations.x = Some(x);
        None
    }

    /// A stage's backward pass, from the gradient of what it gave to that of what it got. The first stage got
    /// token ids: it gives nothing. The last tells the loss.
    #[allow(clippy::too_many_arguments)] // which stage, of what, from where, to where
    pub fn backward(
        &self,
        stage: usize,
        pass: &Pass<'_>,
        batch: &Batch,
        dy: Option<Tensor>,
        store: &mut Store,
        activations: &mut Activations,
        when: WeightGradients,
    ) -> (Option<Tensor>, Loss) {
        let Stage { blocks, embed, layers, head } = &self.stages[stage];
        let (device, groups) = (pass.device, pass.groups);
        let Activations { saved, x, auxiliary, later } = activations;
        let cx = self.cx(pass, batch, Some(auxiliary));
        let embed_filled = store.gradients.filled(blocks.start);
        let (mut dx, losses) = match head {
            None => (dy.expect("the next stage gave a gradient"), None),
            Some(_) => {
                let x = x.take().expect("the forward pass left the head's input");
                let (losses, dx) = self.turn(&cx, stage, batch, x, store, pass.global_tokens);
                (dx, Some(losses))
            }
        };

        let range = layer_blocks(embed, blocks);
        for (block, layer) in range.clone().zip(layers).rev() {
            let next = block.checked_sub(1).filter(|before| range.contains(before));
            store.weights.gather(device, groups, block, next);
            let saved = saved.pop().expect("a forward pass left one for each layer");
            let (grads, filled) = store.gradients.block(device, block);
            let weights = store.weights.block(block);
            match when {
                WeightGradients::Now => {
                    let mut weight_grads = WeightGrads::now(grads, filled);
                    dx = layer.backward(&cx, weights, saved, dx, &mut weight_grads);
                    store.complete(device, groups, block);
                }
                WeightGradients::Later => {
                    let mut work = Vec::new();
                    let mut weight_grads = WeightGrads::deferred(grads, filled, &mut work);
                    dx = layer.backward(&cx, weights, saved, dx, &mut weight_grads);
                    later.push(Later { block, accumulate: filled, work });
                }
            }
            store.weights.release(block, false);
        }

        let auxiliary = auxiliary.borrow().loss();
        let loss =
            Loss { auxiliary, ..losses.map_or(Loss::default(), |losses| read(device, &losses)) };
        let Some(embed) = embed else { return (Some(dx), loss) };
        // A tied output projection has already been at the token table's gradient.
        let tied = head.as_ref().is_some_and(|head| head.output.is_none());
        let (grads, _) = store.gradients.block(device, blocks.start);
        let ids = batch.inputs.view();
        embed.backward(&cx, ids, dx, grads, embed_filled, embed_filled || tied);
        store.weights.release(blocks.start, false);
        store.complete(device, groups, blocks.start);
        (None, loss)
    }

    /// Computes what `backward` put off.
    pub fn weight_gradients(
        &self,
        pass: &Pass<'_>,
        store: &mut Store,
        activations: &mut Activations,
    ) {
        for Later { block, accumulate, work } in activations.later.drain(..) {
            for deferred in work {
                let (grads, _) = store.gradients.block(pass.device, block);
                deferred.run(pass.device, grads, accumulate);
            }
            store.complete(pass.device, pass.groups, block);
        }
    }

    /// A stage's forward pass that saves nothing.
    pub fn infer(
        &self,
        stage: usize,
        pass: &Pass<'_>,
        batch: &Batch,
        x: Option<Tensor>,
        weights: &mut Weights,
        look: &mut dyn FnMut(usize, &Tensor),
    ) -> Tensor {
        let Stage { blocks, embed, layers, .. } = &self.stages[stage];
        let cx = Ctx { dropout: None, ..self.cx(pass, batch, None) };
        let mut x = self.embedded(&cx, batch, x, embed.as_ref(), blocks, weights);
        if embed.is_some() {
            look(blocks.start, &x);
        }
        for (block, layer) in layer_blocks(embed, blocks).zip(layers) {
            let next = Some(block + 1).filter(|next| blocks.contains(next));
            weights.gather(pass.device, pass.groups, block, next);
            x = layer.forward(&cx, weights.block(block), x, Recompute::Full).0;
            weights.release(block, false);
            look(block, &x);
        }
        x
    }

    /// The loss of each token (tokens), f32, from what the last stage's `infer` gave.
    pub fn losses(
        &self,
        pass: &Pass<'_>,
        batch: &Batch,
        x: &Tensor,
        weights: &mut Weights,
    ) -> Tensor {
        let stage = self.stages.last().expect("a rank has a stage");
        let head = stage.head.as_ref().expect("the head is on the last stage");
        let cx = self.cx(pass, batch, None);
        self.need_output(pass.device, pass.groups, stage, head, weights);
        let targets = batch.targets.view();
        let output = self.output(stage, head, weights);
        let losses = head.losses(&cx, weights.block(stage.blocks.end - 1), output, x, targets);
        self.done_with_output(stage, head, weights);
        losses
    }

    /// The loss of a micro-batch on a whole model, without gradients.
    pub fn evaluate(&self, pass: &Pass<'_>, batch: &Batch, weights: &mut Weights) -> Loss {
        let x = self.infer(0, pass, batch, None, weights, &mut |_, _| {});
        read(pass.device, &self.losses(pass, batch, &x, weights))
    }

    /// The logits of every token (tokens, vocab), f32, of a whole model.
    pub fn logits(&self, pass: &Pass<'_>, batch: &Batch, weights: &mut Weights) -> Tensor {
        let x = self.infer(0, pass, batch, None, weights, &mut |_, _| {});
        let stage = &self.stages[0];
        let head = stage.head.as_ref().expect("the whole model is on this rank");
        let cx = self.cx(pass, batch, None);
        self.need_output(pass.device, pass.groups, stage, head, weights);
        let output = self.output(stage, head, weights);
        head.logits(&cx, weights.block(stage.blocks.end - 1), output, &x)
    }

    /// The stream at the beginning of a stage.
    fn embedded(
        &self,
        cx: &Ctx<'_>,
        batch: &Batch,
        x: Option<Tensor>,
        embed: Option<&Embed>,
        blocks: &Range<usize>,
        weights: &mut Weights,
    ) -> Tensor {
        let Some(embed) = embed else { return x.expect("the stage before gave something") };
        weights.gather(cx.device, cx.groups, blocks.start, Some(blocks.start + 1));
        let x = embed.forward(cx, weights.block(blocks.start), batch.inputs.view());
        weights.release(blocks.start, true);
        x
    }

    /// Where forward becomes backward: the losses, and the gradient of the head's input.
    fn turn(
        &self,
        cx: &Ctx<'_>,
        stage: usize,
        batch: &Batch,
        x: Tensor,
        store: &mut Store,
        global_tokens: usize,
    ) -> (Tensor, Tensor) {
        let stage = &self.stages[stage];
        let head = stage.head.as_ref().expect("only the last stage turns");
        let (first, last) = (stage.blocks.start, stage.blocks.end - 1);
        self.need_output(cx.device, cx.groups, stage, head, &mut store.weights);
        let (vocab, dim) = self.output_dims;
        let (mut weight_grads, doutput) = match (&head.output, &stage.embed) {
            (Some(range), _) => {
                let (grads, filled) = store.gradients.block(cx.device, last);
                // The projection is the last of the head's parameters.
                let (norm, place) = grads.split_at(range.start);
                let place = place.shaped(vocab, dim);
                (WeightGrads::now(norm, filled), OutputGradient { place, filled })
            }
            (None, Some(embed)) => {
                let ((table, table_filled), (norm, filled)) =
                    store.gradients.two(cx.device, first, last);
                let place = table.part(embed.tokens.clone()).shaped(vocab, dim);
                (WeightGrads::now(norm, filled), OutputGradient { place, filled: table_filled })
            }
            (None, None) => unreachable!("a head without a projection is on the embedding's rank"),
        };
        // The gradients' borrow ends before their store is told.
        let weights = &store.weights;
        let scale = 1.0 / global_tokens as f32;
        let output = self.output(stage, head, weights);
        let targets = batch.targets.view();
        let turned = head.train(
            cx,
            weights.block(last),
            output,
            x,
            targets,
            scale,
            &mut weight_grads,
            doutput,
        );
        self.done_with_output(stage, head, &mut store.weights);
        store.complete(cx.device, cx.groups, last);
        turned
    }

    fn need_output(
        &self,
        device: &Device,
        groups: &Groups,
        stage: &Stage,
        head: &Head,
        weights: &mut Weights,
    ) {
        weights.gather(device, groups, stage.blocks.end - 1, None);
        if head.output.is_none() {
            weights.gather(device, groups, stage.blocks.start, None);
        }
    }

    fn done_with_output(&self, stage: &Stage, head: &Head, weights: &mut Weights) {
        weights.release(stage.blocks.end - 1, false);
        if head.output.is_none() {
            weights.release(stage.blocks.start, false);
        }
    }

    /// The output projection (vocab, dim).
    pub(crate) fn output<'a>(&self, stage: &Stage, head: &Head, weights: &'a Weights) -> View<'a> {
        match (&head.output, &stage.embed) {
            (Some(range), _) => {
                let head = weights.block(stage.blocks.end - 1);
                head.part(range.clone()).shaped(self.output_dims.0, self.output_dims.1)
            }
            (None, Some(embed)) => embed.table(weights.block(stage.blocks.start)),
            (None, None) => unreachable!("a head without a projection is on the embedding's rank"),
        }
    }

    fn cx<'a>(
        &self,
        pass: &Pass<'a>,
        batch: &'a Batch,
        auxiliary: Option<&'a RefCell<Auxiliary>>,
    ) -> Ctx<'a> {
        Ctx {
            device: pass.device,
            groups: pass.groups,
            dtype: pass.dtype,
            batch: batch.batch,
            runs: &batch.runs,
            dropout: pass.dropout,
            share: batch.tokens() as f32 / pass.global_tokens as f32,
            auxiliary,
            counting: auxiliary.is_some(),
        }
    }
}

impl Stage {
    fn new(
        shape: &Shape,
        part: &Part,
        blocks: Range<usize>,
        rope: Option<&Arc<RopeTable>>,
    ) -> Stage {
        let local = shape.on_rank(&part.mesh, part.coord);
        let mut stage = Stage { blocks: blocks.clone(), embed: None, layers: vec![], head: None };
        for params in &part.blocks[blocks] {
            match params.number {
                0 => stage.embed = Some(Embed::new(shape, part, params)),
                last if last + 1 == part.total_blocks => {
                    stage.head = Some(Head::new(shape, part, params))
                }
                _ => stage.layers.push(Layer::new(&local, params.clone(), rope.cloned())),
            }
        }
        stage
    }
}

/// The numbers of a stage's layers among the rank's blocks.
fn layer_blocks(embed: &Option<Embed>, blocks: &Range<usize>) -> Range<usize> {
    blocks.start + usize::from(embed.is_some())..blocks.end
}

/// Sums losses on the host, in f64 and in order.
pub fn read(device: &Device, losses: &Tensor) -> Loss {
    // A few thousand at a time, so that nothing is allocated.
    let mut host = [0f32; 1024];
    let mut sum = 0.0f64;
    for start in (0..losses.len()).step_by(host.len()) {
        let some = &mut host[..(losses.len() - start).min(1024)];
        device.read(losses.view().part(start..start + some.len()), some);
        some.iter().for_each(|&loss| sum += loss as f64);
    }
    Loss { sum, tokens: losses.len(), auxiliary: 0.0 }
}
