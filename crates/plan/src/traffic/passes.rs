//! What blocks exchange while micro-batches pass through them, and stages between them.

use super::{Collective, List};
use crate::config::Recompute;
use crate::mesh::GroupKind;
use crate::model::{Balance, Family, Moe, Part, Shape, loss_chunk};
use crate::plan::{Layout, Plan};

/// So few rows of the stream do not travel by themselves: multiplied by themselves they would be other sums.
pub const FEW_ROWS: usize = 8;

pub(super) struct Passes<'a> {
    plan: &'a Plan,
    part: &'a Part,
    /// Sizes on this rank.
    shape: Shape,
    /// Of a micro-batch, on this rank.
    tokens: usize,
    /// Of a number in the compute type.
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

    pub fn embed(&self, list: &mut List) {
        self.sum(list);
    }

    pub fn forward(&self, list: &mut List) {
        self.attention(list);
        self.inside(list);
        match self.moe {
            Some(moe) => {
                self.rows(list, moe, self.shape.dim, self.bytes);
                self.sum(list);
            }
            None => self.leave_matrix(list),
        }
    }

    /// The head: two all-reduces for each chunk of logits.
    pub fn turn(&self, list: &mut List) {
        self.enter(list);
        let ranks = list.size(GroupKind::Tensor);
        let chunk = loss_chunk(self.tokens, self.plan.model.vocab.div_ceil(ranks));
        for start in (0..self.tokens).step_by(chunk) {
            let rows = chunk.min(self.tokens - start);
            list.add(GroupKind::Tensor, Collective::AllReduce, rows, 4);
            list.add(GroupKind::Tensor, Collective::AllReduce, 2 * rows, 4);
        }
        self.sum(list);
    }

    pub fn backward(&self, list: &mut List) {
        let recompute = self.plan.layout.recompute;
        if recompute == Recompute::Full {
            self.attention(list);
            self.inside(list);
        }
        // The second half: its gradient, its input once more, and where its wide part is computed again, again.
        match self.moe {
            Some(moe) => {
                self.enter(list);
                self.enter(list);
                self.mixture_backward(list, moe, recompute);
                self.sum(list);
            }
            None => {
                let again = if recompute == Recompute::Selective { 3 } else { 2 };
                (0..again).for_each(|_| self.enter_matrix(list));
                self.leave_matrix(list);
            }
        }
        // The first half.
        self.enter_matrix(list);
        self.attend_backward(list);
        self.enter_matrix(list);
        self.leave_matrix(list);
    }

    pub fn embed_backward(&self, list: &mut List) {
        self.enter(list);
    }

    /// A message to the next stage or the one before.
    pub fn pass_on(&self, list: &mut List) {
        let cut = if self.plan.layout.sequence { self.plan.layout.tensor } else { 1 };
        list.add(GroupKind::Pipe, Collective::SendRecv, self.stream() / cut, self.bytes);
    }

    /// The stream of all tokens.
    fn stream(&self) -> usize {
        self.tokens * self.shape.dim
    }

    /// From a rank's rows of the stream to all.
    fn enter(&self, list: &mut List) {
        if self.plan.layout.sequence {
            list.add(GroupKind::Tensor, Collective::AllGather, self.stream(), self.bytes);
        }
    }

    /// Ranks' parts of a sum become the whole.
    fn sum(&self, list: &mut List) {
        let collective = match self.plan.layout.sequence {
            true => Collective::ReduceScatter,
            false => Collective::AllReduce,
        };
        list.add(GroupKind::Tensor, collective, self.stream(), self.bytes);
    }

    /// The same into a matrix, whose product may begin with the rows that are here.
    fn enter_matrix(&self, list: &mut List) {
        if self.by_rows() { self.pass_rows(list) } else { self.enter(list) }
    }

    /// The same out of a matrix: its product may go on its way rank by rank.
    fn leave_matrix(&self, list: &mut List) {
        if self.by_rows() { self.pass_rows(list) } else { self.sum(list) }
    }

    /// Whether rows of the stream travel while others are multiplied.
    fn by_rows(&self) -> bool {
        let Layout { sequence, tensor, .. } = self.plan.layout;
        sequence && self.plan.comm.overlap.tensor && self.tokens / tensor > FEW_ROWS
    }

    /// A rank's rows to each of the others.
    fn pass_rows(&self, list: &mut List) {
        let ranks = list.size(GroupKind::Tensor);
        for _ in 1..ranks {
            list.add(GroupKind::Tensor, Collective::SendRecv, self.stream() / ranks, self.bytes);
        }
    }

    fn attention(&self, list: &mut List) {
        self.enter_matrix(list);
        self.attend(list);
        self.leave_matrix(list);
    }

    /// The second half up to its last projection.
    fn inside(&self, list: &mut List) {
        let Some(moe) = self.moe else { return self.enter_matrix(list) };
        self.enter(list);
        if moe.aux_loss > 0.0 {
            let (scopes, kind) = match moe.balance {
                Balance::Sequence => (self.plan.train.micro_batch, GroupKind::Context),
                Balance::Batch => (1, GroupKind::Replicas),
            };
            list.add(kind, Collective::AllReduce, 2 * scopes * moe.experts, 4);
        }
        list.add(GroupKind::Expert, Collective::AllToAllV, moe.experts, 4);
        self.rows(list, moe, self.shape.dim, self.bytes);
    }

    /// Rows to their experts, or back.
    fn rows(&self, list: &mut List, moe: Moe, cols: usize, width: usize) {
        let count = self.tokens * moe.top_k * cols;
        list.add(GroupKind::Expert, Collective::AllToAllV, count, width);
    }

    fn mixture_backward(&self, list: &mut List, moe: Moe, recompute: Recompute) {
        let dim = self.shape.dim;
        if recompute == Recompute::Selective {
            self.rows(list, moe, dim, self.bytes);
        }
        // The output's gradient there, the weights' gradient back, the weights there, the input's gradient back.
        self.rows(list, moe, dim, self.bytes);
        self.rows(list, moe, 1, 4);
        list.add(GroupKind::Tensor, Collective::AllReduce, self.tokens * moe.top_k, 4);
        self.rows(list, moe, 1, 4);
        self.rows(list, moe, dim, self.bytes);
    }

    /// Heads of queries, and of keys or values, that a rank attends with when neighbours have dealt out theirs.
    fn dealt(&self) -> (usize, usize) {
        let (shape, ulysses) = (&self.shape, self.part.mesh.ulysses);
        (shape.heads / ulysses, (shape.kv_heads / ulysses).max(1))
    }

    fn attend(&self, list: &mut List) {
        let (heads, keys) = self.dealt();
        self.deal(list, (heads + 2 * keys) * self.shape.head_dim, self.bytes);
        self.round(list, self.bytes);
        self.deal(list, heads * self.shape.head_dim, self.bytes);
    }

    fn attend_backward(&self, list: &mut List) {
        let (heads, keys) = self.dealt();
        self.deal(list, heads, 4);
        self.deal(list, heads * self.shape.head_dim, self.bytes);
        self.round(list, self.bytes);
        self.round(list, 4);
        self.deal(list, (heads + 2 * keys) * self.shape.head_dim, self.bytes);
    }

    /// An all-to-all among neighbours: all tokens' columns of some heads.
    fn deal(&self, list: &mut List, cols: usize, width: usize) {
        let ulysses = self.part.mesh.ulysses;
        let count = ulysses * self.tokens * cols;
        list.add_among(Some(GroupKind::Context), ulysses, Collective::AllToAll, count, width);
    }

    /// Keys and values, or their gradients, pass once round the ring.
    fn round(&self, list: &mut List, width: usize) {
        let (ulysses, context) = (self.part.mesh.ulysses, self.part.mesh.context);
        let (ring, (_, keys)) = (context / ulysses, self.dealt());
        let count = ulysses * self.tokens * 2 * keys * self.shape.head_dim;
        for _ in 1..ring {
            list.add_among(Some(GroupKind::Context), ring, Collective::SendRecv, count, width);
        }
    }
}
