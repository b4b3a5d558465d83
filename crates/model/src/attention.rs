//! The first half of a layer: x + out(attention(qkv(norm(x)))).

use std::ops::Range;
use std::sync::Arc;

use lockstep_kernels::{
    AttentionOutput, AttentionShape, Fp8Copies, Fp8Source, Fp8Tensor, RopeTable, Tensor, View,
    ViewMut,
};
use lockstep_parallel::context::{AttentionBackward, Heads, SavedQkv};
use lockstep_plan::context::Run;
use lockstep_plan::model::{BlockParams, Shape};

use crate::linear::Linear;
use crate::norm::{Norm, NormBackward, SavedNorm};
use crate::residual::{ProjectionInput, add_projection, projection_gradient};
use crate::{Ctx, Slot, WeightGrads};

pub(crate) struct AttentionPart {
    norm: Norm,
    qkv: Linear,
    out: Linear,
    rope: Option<Arc<RopeTable>>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Longest sequence.
    seq: usize,
    /// Dropout site.
    site: u64,
}

/// Activations saved for the backward pass.
pub(crate) struct SavedAttention {
    pub x: Tensor, // (tokens, dim)
    norm: SavedNorm,
    out: Tensor, // (tokens, heads * head_dim)
    /// The inputs of `qkv` and `out` in fp8, if saved.
    fp8: Option<[Fp8Tensor; 2]>,
    /// None if communication failed: the pass runs to its end on undefined values and the step is discarded.
    inside: Option<SavedQkv>,
}

impl SavedAttention {
    /// Calls `visit` with all tensors. Matrices in fp8 stay where they are.
    pub fn tensors(&mut self, visit: &mut dyn FnMut(&mut Tensor)) {
        let SavedAttention { x, norm, out, fp8: _, inside } = self;
        [x, out].into_iter().for_each(&mut *visit);
        norm.tensors(visit);
        if let Some(inside) = inside {
            [&mut inside.qkv, &mut inside.lse].into_iter().for_each(visit);
        }
    }
}

/// Keys and values of the tokens so far, each (seq, kv_heads * head_dim).
struct KeyValues {
    keys: Tensor,
    values: Tensor,
}

impl AttentionPart {
    pub fn new(
        shape: &Shape,
        params: &BlockParams,
        rope: Option<Arc<RopeTable>>,
        site: u64,
    ) -> AttentionPart {
        AttentionPart {
            norm: Norm::new(params, "norm1", shape.norm_eps),
            qkv: Linear::fused(params, &["attention.q", "attention.k", "attention.v"]),
            out: Linear::new(params, "attention.out"),
            rope,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            seq: shape.seq,
            site,
        }
    }

    pub fn forward(&self, cx: &Ctx<'_>, x: Tensor) -> (Tensor, SavedAttention) {
        let device = cx.device;
        let (normed, norm) = self.norm.forward(cx, &x, cx.keeps_cheap() && cx.fp8.is_none());
        let mut qkv = cx.saved(cx.tokens(), self.qkv.rows());
        let mut qkv_input = None;
        if cx.fp8.is_some() {
            let from = Fp8Source::Whole(normed.view());
            let input = self.qkv.fp8_input(cx, from, cx.fp8_copies());
            drop(normed);
            self.qkv.fp8_forward(cx, &input, None, qkv.view_mut());
            qkv_input = cx.save_fp8(input);
        } else {
            cx.groups.start_gather_sequence(device, normed).for_each(|rows, normed| {
                let to = qkv.view_mut().rows_of(rows);
                device.matmul(self.qkv.forward(cx, normed, to));
            });
        }
        if let Some(rope) = &self.rope {
            for (run, rows) in cx.placed_runs() {
                device.rope(rope, &self.run(cx, run), qkv.view_mut().rows_of(rows));
            }
        }
        let mut out = cx.saved(cx.tokens(), self.heads * self.head_dim);
        let inside = self.attend(cx, qkv, out.view_mut());
        let Some(_) = cx.fp8 else {
            let input = ProjectionInput::Whole(out.view());
            let y = add_projection(cx, self.site, &self.out, input, &x);
            return (y, SavedAttention { x, norm, out, fp8: None, inside });
        };
        let input = self.out.fp8_input(cx, Fp8Source::Whole(out.view()), cx.fp8_copies());
        let y = add_projection(cx, self.site, &self.out, ProjectionInput::Fp8(&input), &x);
        let fp8 = qkv_input.zip(cx.save_fp8(input)).map(|(qkv, out)| [qkv, out]);
        (y, SavedAttention { x, norm, out, fp8, inside })
    }

    /// Attention over the tokens of this rank, or with those of the context axis.
    fn attend(&self, cx: &Ctx<'_>, qkv: Tensor, out: ViewMut<'_>) -> Option<SavedQkv> {
        let Some(context) = cx.groups.context() else {
            let mut lse = cx.saved_f32(cx.batch * self.heads, cx.seq());
            cx.device.attention(&self.square(cx), qkv.view(), out, lse.view_mut());
            return Some(SavedQkv { qkv, lse });
        };
        let saved = context.forward(cx.device, &self.heads(cx), qkv, out);
        saved.map_err(|error| cx.groups.record(Err(error))).ok()
    }

    /// The gradient of q, k and v.
    fn attend_backward(
        &self,
        cx: &Ctx<'_>,
        inside: Option<SavedQkv>,
        out: View<'_>,
        dout: View<'_>,
    ) -> Tensor {
        let mut dqkv = cx.scratch(cx.tokens(), self.qkv.rows());
        match (inside, cx.groups.context()) {
            (None, _) => cx.device.fill(dqkv.view_mut(), 0.0),
            (Some(saved), None) => {
                let output = AttentionOutput { out, lse: saved.lse.view(), dout };
                let (shape, qkv) = (self.square(cx), saved.qkv.view());
                cx.device.attention_backward(&shape, qkv, output, dqkv.view_mut())
            }
            (Some(saved), Some(context)) => {
                let (heads, dqkv) = (self.heads(cx), dqkv.view_mut());
                let backward = AttentionBackward { saved, out, dout, dqkv };
                cx.groups.record(context.backward(cx.device, &heads, backward));
            }
        }
        dqkv
    }

    /// The bias of the projection, if its gradient is the sum of the columns of the stream's gradient: then the norm of the
    /// feed-forward computes it on the way.
    pub fn bias_in_stream(&self, cx: &Ctx<'_>) -> Option<Range<usize>> {
        let same = cx.dropout.is_none() && !cx.groups.sequence && cx.fp8.is_none();
        self.out.bias_range().filter(|_| same)
    }

    /// The gradient of the input from that of the output.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        saved: SavedAttention,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let device = cx.device;
        let SavedAttention { x, mut norm, out, fp8, inside } = saved;
        let [qkv_input, out_input] = fp8.map_or([None, None], |inputs| inputs.map(Some));

        // Through the projection and the attention itself.
        let mut dout;
        if cx.fp8.is_some() {
            let dprojected = projection_gradient(cx, self.site, &dy).wait();
            let input = out_input.unwrap_or_else(|| {
                self.out.fp8_input(cx, Fp8Source::Whole(out.view()), Fp8Copies::Transposed)
            });
            let dprojected = Fp8Source::Whole(dprojected.view());
            dout = self.out.fp8_backward(cx, input, dprojected, grads);
        } else {
            dout = cx.scratch(cx.tokens(), out.cols());
            let coming = projection_gradient(cx, self.site, &dy);
            let dprojected = coming.for_each_and_gather(|rows, dprojected| {
                self.out.input_gradient(cx, dprojected, dout.view_mut().rows_of(rows));
            });
            match self.bias_in_stream(cx) {
                Some(_) => grads.weight(self.out.weight_range(), &dprojected, &out),
                None => self.out.weight_gradient(&dprojected, &out, grads),
            }
        }
        let mut dqkv = self.attend_backward(cx, inside, out.view(), dout.view());
        drop((out, dout));
        if let Some(rope) = &self.rope {
            for (run, rows) in cx.placed_runs() {
                device.rope_backward(rope, &self.run(cx, run), dqkv.view_mut().rows_of(rows));
            }
        }

        // Through q, k, v and the norm; the residual adds its gradient.
        let dnormed = if cx.fp8.is_some() {
            let input = qkv_input.unwrap_or_else(|| {
                let normed = self.norm.output(cx, &x, &mut norm);
                self.qkv.fp8_input(cx, Fp8Source::Whole(normed.view()), Fp8Copies::Transposed)
            });
            self.qkv.fp8_backward(cx, input, Fp8Source::Whole(dqkv.view()), grads)
        } else {
            let normed = self.norm.output(cx, &x, &mut norm);
            let normed = cx.groups.start_gather_sequence(device, normed);
            self.qkv.backward(cx, normed, dqkv, grads)
        };
        let mut dx = cx.writable(dy);
        let (dy, of_x) = (dnormed.view(), dx.view_mut());
        let of = NormBackward { x: &x, stats: &norm.stats, dy, dx: of_x, bias_before: None };
        self.norm.backward(cx, of, grads);
        dx
    }

    /// The forward pass of one sequence's next tokens, whose keys and values are added to the cache.
    pub fn extend(&self, cx: &Ctx<'_>, x: &Tensor, cache: &mut Slot) -> Tensor {
        let device = cx.device;
        let (normed, _) = self.norm.forward_temporary(cx, x);
        let mut qkv = cx.scratch(x.rows(), self.qkv.rows());
        device.matmul(self.qkv.forward(cx, normed.view(), qkv.view_mut()));

        let start = cx.runs[0].start;
        let end = start + cx.seq();
        let new = AttentionShape { q_start: start, k_start: start, ..self.square(cx) };
        if let Some(rope) = &self.rope {
            device.rope(rope, &new, qkv.view_mut());
        }
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let KeyValues { keys, values } = cache.get_or_insert_with(|| KeyValues {
            keys: cx.scratch(self.seq, kv),
            values: cx.scratch(self.seq, kv),
        });
        device.copy_columns(qkv.view(), q, keys.view_mut().rows_of(start..end));
        device.copy_columns(qkv.view(), q + kv, values.view_mut().rows_of(start..end));

        let all = AttentionShape { k_len: end, k_start: 0, ..new };
        let (mut out, mut lse) = (cx.scratch(x.rows(), q), cx.scratch_f32(self.heads, cx.seq()));
        let (keys, values) = (keys.view().rows_of(0..end), values.view().rows_of(0..end));
        let inputs = [qkv.view(), keys, values];
        device.attention_block(&all, inputs, out.view_mut(), lse.view_mut());
        add_projection(cx, self.site, &self.out, ProjectionInput::Whole(out.view()), x)
    }

    fn square(&self, cx: &Ctx<'_>) -> AttentionShape {
        AttentionShape::square(cx.batch, cx.seq(), self.heads, self.kv_heads, self.head_dim)
    }

    fn heads(&self, cx: &Ctx<'_>) -> Heads {
        let AttentionShape { batch, heads, kv_heads, head_dim, scale, .. } = self.square(cx);
        Heads { batch, heads, kv_heads, head_dim, scale }
    }

    /// The tokens of one run, at their positions.
    fn run(&self, cx: &Ctx<'_>, run: Run) -> AttentionShape {
        AttentionShape { q_start: run.start, q_len: run.len, ..self.square(cx) }
    }
}
