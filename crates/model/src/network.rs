//! A whole model on one rank: embedding, layers, head.

use std::cell::RefCell;
use std::sync::Arc;

use lockstep_kernels::{Device, Dtype, RopeScaling, RopeTable, Tag, Tensor, View};
use lockstep_plan::model::{Family, Shape};

use crate::embed::Embed;
use crate::head::{Head, OutputGradient};
use crate::{Auxiliary, Block, Cx, Dropout, Gradients, Layer, Recompute, Saved, Sink, Weights};

/// The code of a model: what to do with parameters that lie elsewhere.
pub struct Model {
    pub shape: Shape,
    pub(crate) embed: Embed,
    pub(crate) layers: Vec<Layer>,
    pub(crate) head: Head,
}

/// A micro-batch in device memory.
pub struct Batch {
    pub batch: usize,
    pub seq: usize,
    pub inputs: Tensor,  // (batch, seq), u32
    pub targets: Tensor, // (batch, seq), u32; u32::MAX where nothing is to be predicted
}

/// What a micro-batch lost.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Loss {
    /// Cross-entropy in nats, summed over the tokens that have something to predict.
    pub sum: f64,
    /// Of the micro-batch, also those whose target is `u32::MAX` and which lost nothing: `sum / tokens` is a
    /// mean over all positions.
    pub tokens: usize,
    /// Load balancing and z-loss of the routers, weighted as they enter the objective.
    pub auxiliary: f64,
}

/// How a training pass is done.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Of activations.
    pub dtype: Dtype,
    pub recompute: Recompute,
    pub dropout: Option<Dropout>,
    /// Tokens of the whole global batch: gradients are those of the mean over them.
    pub global_tokens: usize,
}

/// What passes keep from step to step so that nothing is allocated.
#[derive(Default)]
pub struct Tape {
    saved: Vec<Saved>,
    losses: Vec<f32>,
    /// What the routers did in the last micro-batch.
    pub auxiliary: RefCell<Auxiliary>,
}

impl Batch {
    /// Room for `batch` sequences of `seq` tokens.
    pub fn empty(device: &Device, batch: usize, seq: usize) -> Batch {
        let ids = || device.empty(batch, seq, Dtype::U32, Tag::Buffers);
        Batch { batch, seq, inputs: ids(), targets: ids() }
    }

    /// From `batch` runs of `seq + 1` tokens each: inputs, and their successors as targets.
    pub fn fill(&mut self, device: &Device, samples: &[u32]) {
        let (batch, seq) = (self.batch, self.seq);
        assert_eq!(
            samples.len(),
            batch * (seq + 1),
            "{batch} samples of {seq} tokens and one more"
        );
        for (row, sample) in samples.chunks_exact(seq + 1).enumerate() {
            device.write(self.inputs.view_mut().part(row * seq..(row + 1) * seq), &sample[..seq]);
            device.write(self.targets.view_mut().part(row * seq..(row + 1) * seq), &sample[1..]);
        }
    }
}

impl Model {
    /// The blocks of a shape, and the tables they share.
    pub fn new(shape: &Shape) -> Model {
        let scaling = shape.rope_scaling.map(|scaling| RopeScaling {
            factor: scaling.factor,
            low_freq_factor: scaling.low_freq_factor,
            high_freq_factor: scaling.high_freq_factor,
            original_positions: scaling.original_seq,
        });
        let rope = (shape.family != Family::Gpt2).then(|| {
            Arc::new(RopeTable::new(shape.head_dim, shape.seq, shape.rope_theta, scaling))
        });
        Model {
            embed: Embed::new(shape),
            layers: (0..shape.layers).map(|layer| Layer::new(shape, layer, rope.clone())).collect(),
            head: Head::new(shape),
            shape: shape.clone(),
        }
    }

    /// Embedding, layers, head.
    pub fn blocks(&self) -> usize {
        self.layers.len() + 2
    }

    /// Forward and backward of one micro-batch. Its gradients are added to what earlier micro-batches of the
    /// step left.
    pub fn train(
        &self,
        device: &Device,
        weights: &Weights,
        batch: &Batch,
        pass: &Pass,
        gradients: &mut Gradients,
        tape: &mut Tape,
    ) -> Loss {
        let Tape { saved: tape_saved, auxiliary, .. } = tape;
        if let Some(moe) = &self.shape.moe {
            auxiliary.get_mut().clear(moe.experts);
        }
        let cx = Cx {
            dropout: pass.dropout,
            share: (batch.batch * batch.seq) as f32 / pass.global_tokens as f32,
            auxiliary: Some(auxiliary),
            counting: true,
            ..cx(device, batch, pass.dtype)
        };
        let embed_filled = gradients.get(0).is_some();

        let mut x = self.embed.forward(&cx, weights.block(0), batch.inputs.view(), 0);
        for (index, layer) in self.layers.iter().enumerate() {
            let (y, saved) = layer.forward(&cx, weights.block(index + 1), x, pass.recompute);
            tape_saved.push(saved);
            x = y;
        }

        let (losses, mut dx) = self.turn(&cx, weights, batch, x, pass, gradients);

        for (index, layer) in self.layers.iter().enumerate().rev() {
            let saved = tape_saved.pop().expect("a forward pass left one for each layer");
            let (grads, filled) = gradients.block(device, index + 1, layer.params().len());
            let mut sink = Sink::now(grads.view_mut(), filled);
            dx = layer.backward(&cx, weights.block(index + 1), saved, dx, &mut sink);
        }
        // A tied output projection has already been at the token table's gradient.
        let tokens_filled = embed_filled || self.head.output.is_none();
        let (grads, _) = gradients.block(device, 0, self.embed.params.len());
        self.embed.backward(
            &cx,
            batch.inputs.view(),
            dx,
            grads.view_mut(),
            embed_filled,
            tokens_filled,
        );

        let auxiliary = self.shape.moe.map_or(0.0, |moe| auxiliary.borrow().loss(&moe));
        Loss { auxiliary, ..tape.read(device, &losses) }
    }

    /// Where forward becomes backward: the losses, and the gradient of the head's input.
    fn turn(
        &self,
        cx: &Cx<'_>,
        weights: &Weights,
        batch: &Batch,
        x: Tensor,
        pass: &Pass,
        gradients: &mut Gradients,
    ) -> (Tensor, Tensor) {
        let last = self.layers.len() + 1;
        let (vocab, dim) = (self.shape.vocab, self.shape.dim);
        let (mut sink, doutput) = match &self.head.output {
            Some(range) => {
                let (grads, filled) = gradients.block(cx.device, last, self.head.params.len());
                // The projection is the last of the head's parameters.
                let (norm, place) = grads.view_mut().split_at(range.start);
                (
                    Sink::now(norm, filled),
                    OutputGradient { place: place.shaped(vocab, dim), filled },
                )
            }
            None => {
                let (embed, head) =
                    gradients.ends(cx.device, self.embed.params.len(), self.head.params.len());
                let place = embed.0.view_mut().part(self.embed.tokens.clone()).shaped(vocab, dim);
                (Sink::now(head.0.view_mut(), head.1), OutputGradient { place, filled: embed.1 })
            }
        };
        let scale = 1.0 / pass.global_tokens as f32;
        let (head, output, targets) =
            (weights.block(last), self.output(weights), batch.targets.view());
        self.head.train(cx, head, output, x, targets, scale, &mut sink, doutput)
    }

    /// The loss of a micro-batch, without gradients.
    pub fn evaluate(
        &self,
        device: &Device,
        weights: &Weights,
        batch: &Batch,
        dtype: Dtype,
        tape: &mut Tape,
    ) -> Loss {
        let cx = cx(device, batch, dtype);
        let x = self.stream(&cx, weights, batch, |_, _| {});
        let head = weights.block(self.layers.len() + 1);
        let losses = self.head.losses(&cx, head, self.output(weights), &x, batch.targets.view());
        tape.read(device, &losses)
    }

    /// The logits of every token (tokens, vocab), f32.
    pub fn logits(
        &self,
        device: &Device,
        weights: &Weights,
        batch: &Batch,
        dtype: Dtype,
    ) -> Tensor {
        let cx = cx(device, batch, dtype);
        let x = self.stream(&cx, weights, batch, |_, _| {});
        self.head.logits(&cx, weights.block(self.layers.len() + 1), self.output(weights), &x)
    }

    /// The name of the first block whose parameters or output are not finite numbers: where a NaN came in.
    pub fn first_not_finite(
        &self,
        device: &Device,
        weights: &Weights,
        batch: &Batch,
        dtype: Dtype,
    ) -> Option<String> {
        for (index, block) in weights.layout.iter().enumerate() {
            let broken = |(start, param): &(usize, &lockstep_plan::model::Param)| {
                device.count_not_finite(weights.master(index).part(*start..start + param.len())) > 0
            };
            if let Some((_, param)) = block.placed().find(broken) {
                return Some(format!("{}.{} (the parameter itself)", block.name, param.name));
            }
        }
        let cx = cx(device, batch, dtype);
        let mut found = None;
        let x = self.stream(&cx, weights, batch, |block, x| {
            if found.is_none() && device.count_not_finite(x.view()) > 0 {
                found = Some(block);
            }
        });
        if found.is_none() {
            let head = weights.block(self.layers.len() + 1);
            let losses =
                self.head.losses(&cx, head, self.output(weights), &x, batch.targets.view());
            found = (device.count_not_finite(losses.view()) > 0).then_some(self.layers.len() + 1);
        }
        found.map(|block| format!("{} (its output)", weights.layout[block].name))
    }

    /// The residual stream before the head; `look` sees it after each block.
    fn stream(
        &self,
        cx: &Cx<'_>,
        weights: &Weights,
        batch: &Batch,
        mut look: impl FnMut(usize, &Tensor),
    ) -> Tensor {
        let mut x = self.embed.forward(cx, weights.block(0), batch.inputs.view(), 0);
        look(0, &x);
        for (index, layer) in self.layers.iter().enumerate() {
            x = layer.forward(cx, weights.block(index + 1), x, Recompute::Full).0;
            look(index + 1, &x);
        }
        x
    }

    /// The output projection (vocab, dim).
    pub(crate) fn output<'a>(&self, weights: &'a Weights) -> View<'a> {
        match &self.head.output {
            Some(range) => {
                let head = weights.block(self.layers.len() + 1);
                head.part(range.clone()).shaped(self.shape.vocab, self.shape.dim)
            }
            None => self.embed.table(weights.block(0)),
        }
    }
}

/// For a pass without gradients.
fn cx<'a>(device: &'a Device, batch: &Batch, dtype: Dtype) -> Cx<'a> {
    let Batch { batch, seq, .. } = *batch;
    Cx { device, dtype, batch, seq, dropout: None, share: 1.0, auxiliary: None, counting: false }
}

impl Tape {
    /// Sums losses on the host, in f64 and in order.
    fn read(&mut self, device: &Device, losses: &Tensor) -> Loss {
        self.losses.resize(losses.len(), 0.0);
        device.read(losses.view(), &mut self.losses);
        let sum = self.losses.iter().map(|&loss| loss as f64).sum();
        Loss { sum, tokens: losses.len(), auxiliary: 0.0 }
    }
}
