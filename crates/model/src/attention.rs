//! The first half of a layer: x + out(attention(qkv(norm(x)))).

use std::sync::Arc;

use lockstep_kernels::{Attention, RopeTable, Tensor, View, ViewMut};
use lockstep_parallel::context::{Heads, Saved};
use lockstep_plan::context::Run;
use lockstep_plan::model::{BlockParams, Shape};

use crate::linear::Linear;
use crate::norm::Norm;
use crate::stream::{add_projection, projection_gradient};
use crate::{Ctx, WeightGrads};

pub(crate) struct AttentionPart {
    pub norm: Norm,
    pub qkv: Linear,
    pub out: Linear,
    pub rope: Option<Arc<RopeTable>>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Tells its dropout from that of other places.
    site: u64,
}

/// What the backward pass needs beside the input.
pub(crate) struct AttentionSaved {
    stats: Tensor, // (tokens, 1 or 2), f32
    out: Tensor,   // (tokens, heads * head_dim)
    /// None when an exchange failed: the pass goes on with nothing, to its end.
    inside: Option<Saved>,
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
            qkv: Linear::joined(params, &["attention.q", "attention.k", "attention.v"]),
            out: Linear::new(params, "attention.out"),
            rope,
            heads: shape.heads,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            site,
        }
    }

    pub fn forward(&self, cx: &Ctx<'_>, weights: View<'_>, x: &Tensor) -> (Tensor, AttentionSaved) {
        let device = cx.device;
        let mut stats = cx.kept_wide(x.rows(), self.norm.stats());
        let mut qkv = cx.kept(cx.tokens(), self.qkv.rows());
        {
            let mut normed = cx.scratch(x.rows(), x.cols());
            self.norm.forward(device, weights, x.view(), normed.view_mut(), stats.view_mut());
            cx.groups.start_enter(device, normed).each(|rows, normed| {
                let to = qkv.view_mut().rows_of(rows);
                device.matmul(self.qkv.forward(weights, normed, to));
            });
        }
        if let Some(rope) = &self.rope {
            for (run, rows) in cx.placed_runs() {
                device.rope(rope, &self.run(cx, run), qkv.view_mut().rows_of(rows));
            }
        }
        let mut out = cx.kept(cx.tokens(), self.heads * self.head_dim);
        let inside = self.attend(cx, qkv, out.view_mut());
        let y = add_projection(cx, self.site, &self.out, weights, out.view(), x);
        (y, AttentionSaved { stats, out, inside })
    }

    /// With whom this rank's queries meet: the tokens here, or those of other ranks too.
    fn attend(&self, cx: &Ctx<'_>, qkv: Tensor, out: ViewMut<'_>) -> Option<Saved> {
        let Some(context) = cx.groups.context() else {
            let mut lse = cx.kept_wide(cx.batch * self.heads, cx.seq());
            cx.device.attention(&self.square(cx), qkv.view(), out, lse.view_mut());
            return Some(Saved { qkv, lse });
        };
        let saved = context.forward(cx.device, &self.heads(cx), qkv, out);
        saved.map_err(|error| cx.groups.note(Err(error))).ok()
    }

    fn attend_backward(
        &self,
        cx: &Ctx<'_>,
        inside: Option<Saved>,
        out: View<'_>,
        dout: View<'_>,
        dqkv: ViewMut<'_>,
    ) {
        let Some(saved) = inside else { return cx.device.fill(dqkv, 0.0) };
        match cx.groups.context() {
            None => {
                let (qkv, lse) = (saved.qkv.view(), saved.lse.view());
                cx.device.attention_backward(&self.square(cx), qkv, out, dout, lse, dqkv)
            }
            Some(context) => {
                let heads = self.heads(cx);
                cx.groups.note(context.backward(cx.device, &heads, saved, out, dout, dqkv));
            }
        }
    }

    /// From the gradient of the stream after this half to the one before it.
    pub fn backward(
        &self,
        cx: &Ctx<'_>,
        weights: View<'_>,
        x: &Tensor,
        saved: AttentionSaved,
        dy: Tensor,
        grads: &mut WeightGrads<'_>,
    ) -> Tensor {
        let device = cx.device;
        let AttentionSaved { stats, out, inside } = saved;

        // Through the projection and the attention itself.
        let mut dout = cx.scratch(cx.tokens(), out.cols());
        {
            let coming = projection_gradient(cx, self.site, &dy);
            let dprojected = coming.each_of_all(|rows, dprojected| {
                let dout = dout.view_mut().rows_of(rows);
                self.out.input_gradient(device, weights, dprojected, dout);
            });
            self.out.weight_gradient(device, &dprojected, &out, grads);
        }
        let mut dqkv = cx.scratch(cx.tokens(), self.qkv.rows());
        self.attend_backward(cx, inside, out.view(), dout.view(), dqkv.view_mut());
        drop((out, dout));
        if let Some(rope) = &self.rope {
            for (run, rows) in cx.placed_runs() {
                device.rope_backward(rope, &self.run(cx, run), dqkv.view_mut().rows_of(rows));
            }
        }

        // Through q, k, v and the norm; the residual adds its own.
        let mut normed = cx.scratch(x.rows(), x.cols());
        self.norm.again(device, weights, x.view(), stats.view(), normed.view_mut());
        let normed = cx.groups.start_enter(device, normed);
        let dnormed = self.qkv.backward(cx, weights, normed, dqkv, grads);
        let mut dx = cx.own(dy);
        self.norm.backward(cx, weights, x, &stats, dnormed.view(), dx.view_mut(), grads);
        dx
    }

    pub fn square(&self, cx: &Ctx<'_>) -> Attention {
        Attention::square(cx.batch, cx.seq(), self.heads, self.kv_heads, self.head_dim)
    }

    fn heads(&self, cx: &Ctx<'_>) -> Heads {
        let Attention { batch, heads, kv_heads, head_dim, scale, .. } = self.square(cx);
        Heads { batch, heads, kv_heads, head_dim, scale }
    }

    /// The tokens of one run, at their positions.
    fn run(&self, cx: &Ctx<'_>, run: Run) -> Attention {
        Attention { q_start: run.start, q_len: run.len, ..self.square(cx) }
    }
}
