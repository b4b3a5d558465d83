//! Communication inside the passes of blocks, and between pipeline stages.

use super::{Collective, List};
use crate::config::Recompute;
use crate::mesh::GroupKind;
use crate::model::{Balance, Family, Moe, Part, Shape, loss_chunk};
use crate::passes::PassEvent;
use crate::plan::{Layout, Plan};
use lockstep_types::SMALL_GEMM_ROWS;

pub(super) struct Passes<'a> {
    plan: &'a Plan,
    part: &'a Part,
    /// Sizes on this rank.
    shape: Shape,
    /// Tokens of a micro-batch on this rank.
    tokens: usize,
    /// Bytes of a number in the compute type.
    bytes: usize,
    moe: Option<Moe>,
}

impl<'a> Passes<'a> {
    pub fn new(plan: &'a Plan, part: &'a Part) -> Passes<'a> {
        let shape = plan.model.on_rank(&part.mesh, part.coord);
        Passes {
            plan,
            part,
            tokens: plan.train.micro_batch * plan.data.seq / plan.layout.context,
            bytes: plan.precision.compute.bytes(),
            moe: shape.moe.filter(|_| shape.family == Family::Moe),
            shape,
        }
    }

    /// Adds the communication of one pass.
    pub fn add(&self, list: &mut List, pass: PassEvent) {
        match pass {
            PassEvent::Embed { .. } => self.reduce_output(list),
            PassEvent::Forward { .. } => self.forward(list),
            PassEvent::LossAndBackward { .. } => self.loss_and_backward(list),
            PassEvent::Backward { .. } => self.backward(list),
            PassEvent::EmbedBackward { .. } => self.gather_sequence(list),
            PassEvent::Sent { .. } => self.send(list),
            PassEvent::Received { .. } | PassEvent::Weights { .. } => {}
        }
    }

    fn forward(&self, list: &mut List) {
        self.attention(list);
        self.feed_forward(list);
        match self.moe {
            Some(moe) => {
                self.rows(list, moe, self.shape.dim, self.bytes);
                self.reduce_output(list);
            }
            None => self.matmul_output(list),
        }
    }

    /// The head: two all-reduces for each chunk of logits.
    fn loss_and_backward(&self, list: &mut List) {
        self.gather_sequence(list);
        let ranks = list.size(GroupKind::Tensor);
        let columns = self.plan.model.vocab.div_ceil(ranks);
        let chunk = loss_chunk(self.plan.device.kind, self.tokens, columns);
        for start in (0..self.tokens).step_by(chunk) {
            let rows = chunk.min(self.tokens - start);
            list.add(GroupKind::Tensor, Collective::AllReduce, rows, 4);
            list.add(GroupKind::Tensor, Collective::AllReduce, 2 * rows, 4);
        }
        self.reduce_output(list);
    }

    fn backward(&self, list: &mut List) {
        let recompute = self.plan.layout.recompute;
        if recompute == Recompute::Full {
            self.attention(list);
            self.feed_forward(list);
        }
        // The feed-forward: the gradient of its output, its input once more, and again if it is recomputed.
        match self.moe {
            Some(moe) => {
                self.gather_sequence(list);
                self.gather_sequence(list);
                self.mixture_backward(list, moe, recompute);
                self.reduce_output(list);
            }
            None => {
                let again = if recompute == Recompute::Selective { 3 } else { 2 };
                (0..again).for_each(|_| self.matmul_input(list));
                self.matmul_output(list);
            }
        }
        // Attention.
        self.matmul_input(list);
        self.attend_backward(list);
        self.matmul_input(list);
        self.matmul_output(list);
    }

    /// A message to the next stage or the previous one.
    fn send(&self, list: &mut List) {
        let cut = if self.plan.layout.sequence { self.plan.layout.tensor } else { 1 };
        list.add(GroupKind::Pipe, Collective::SendRecv, self.stream() / cut, self.bytes);
    }

    /// Elements of the residual stream of all tokens.
    fn stream(&self) -> usize {
        self.tokens * self.shape.dim
    }

    /// With sequence parallelism, gathers the rows of all tensor ranks.
    fn gather_sequence(&self, list: &mut List) {
        if self.plan.layout.sequence {
            list.add(GroupKind::Tensor, Collective::AllGather, self.stream(), self.bytes);
        }
    }

    /// Sums the partial outputs of the tensor ranks.
    fn reduce_output(&self, list: &mut List) {
        let collective = match self.plan.layout.sequence {
            true => Collective::ReduceScatter,
            false => Collective::AllReduce,
        };
        list.add(GroupKind::Tensor, collective, self.stream(), self.bytes);
    }

    /// Gathers the input of a matmul, which may begin with the local rows.
    fn matmul_input(&self, list: &mut List) {
        if self.by_rows() { self.send_rows(list) } else { self.gather_sequence(list) }
    }

    /// Sums the output of a matmul, which may be sent rank by rank.
    fn matmul_output(&self, list: &mut List) {
        if self.by_rows() { self.send_rows(list) } else { self.reduce_output(list) }
    }

    /// Whether rows of the stream are sent while others are multiplied.
    fn by_rows(&self) -> bool {
        let Layout { sequence, tensor, .. } = self.plan.layout;
        sequence && self.plan.comm.overlap.tensor && self.tokens / tensor > SMALL_GEMM_ROWS
    }

    /// Sends this rank's rows to each of the others.
    fn send_rows(&self, list: &mut List) {
        let ranks = list.size(GroupKind::Tensor);
        for _ in 1..ranks {
            list.add(GroupKind::Tensor, Collective::SendRecv, self.stream() / ranks, self.bytes);
        }
    }

    fn attention(&self, list: &mut List) {
        self.matmul_input(list);
        self.attend(list);
        self.matmul_output(list);
    }

    /// The feed-forward up to its last projection.
    fn feed_forward(&self, list: &mut List) {
        let Some(moe) = self.moe else { return self.matmul_input(list) };
        self.gather_sequence(list);
        if moe.aux_loss > 0.0 && moe.balance == Balance::Sequence {
            let count = 2 * self.plan.train.micro_batch * moe.experts;
            list.add(GroupKind::Context, Collective::AllReduce, count, 4);
        }
        list.add(GroupKind::Expert, Collective::AllToAllV, moe.experts, 4);
        self.rows(list, moe, self.shape.dim, self.bytes);
    }

    /// Sends rows to their experts, or back.
    fn rows(&self, list: &mut List, moe: Moe, cols: usize, width: usize) {
        let count = self.tokens * moe.top_k * cols;
        list.add(GroupKind::Expert, Collective::AllToAllV, count, width);
    }

    fn mixture_backward(&self, list: &mut List, moe: Moe, recompute: Recompute) {
        let dim = self.shape.dim;
        if recompute == Recompute::Selective {
            self.rows(list, moe, dim, self.bytes);
        }
        // The output's gradient to the experts, the weights' gradient back, the weights to them, the input's gradient back.
        self.rows(list, moe, dim, self.bytes);
        self.rows(list, moe, 1, 4);
        list.add(GroupKind::Tensor, Collective::AllReduce, self.tokens * moe.top_k, 4);
        self.rows(list, moe, 1, 4);
        self.rows(list, moe, dim, self.bytes);
    }

    /// Query heads, and key or value heads, of a rank after Ulysses has distributed them.
    fn ulysses_heads(&self) -> (usize, usize) {
        let (shape, ulysses) = (&self.shape, self.part.mesh.ulysses);
        (shape.heads / ulysses, (shape.kv_heads / ulysses).max(1))
    }

    fn attend(&self, list: &mut List) {
        let (heads, keys) = self.ulysses_heads();
        self.exchange_heads(list, (heads + 2 * keys) * self.shape.head_dim, self.bytes);
        self.ring(list, self.bytes);
        self.exchange_heads(list, heads * self.shape.head_dim, self.bytes);
    }

    fn attend_backward(&self, list: &mut List) {
        let (heads, keys) = self.ulysses_heads();
        self.exchange_heads(list, heads, 4);
        self.exchange_heads(list, heads * self.shape.head_dim, self.bytes);
        self.ring(list, self.bytes);
        self.ring(list, 4);
        self.exchange_heads(list, (heads + 2 * keys) * self.shape.head_dim, self.bytes);
    }

    /// Ulysses' all-to-all: the columns of some heads for all tokens.
    fn exchange_heads(&self, list: &mut List, cols: usize, width: usize) {
        let ulysses = self.part.mesh.ulysses;
        let count = ulysses * self.tokens * cols;
        list.add_among(Some(GroupKind::Context), ulysses, Collective::AllToAll, count, width);
    }

    /// Sends keys and values, or their gradients, once around the ring.
    fn ring(&self, list: &mut List, width: usize) {
        let (ulysses, context) = (self.part.mesh.ulysses, self.part.mesh.context);
        let (ring, (_, keys)) = (context / ulysses, self.ulysses_heads());
        let count = ulysses * self.tokens * 2 * keys * self.shape.head_dim;
        for _ in 1..ring {
            list.add_among(Some(GroupKind::Context), ring, Collective::SendRecv, count, width);
        }
    }
}
