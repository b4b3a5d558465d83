//! What one rank holds of a model: its stages, and its piece of each parameter there.

use std::ops::Range;

use super::params::keys_of;
use super::{BlockParams, Lead, Param, Shape, Split};
use crate::cut;
use crate::mesh::{Coord, Mesh};

/// A rank's piece of a model.
#[derive(Clone, PartialEq, Debug)]
pub struct Part {
    pub mesh: Mesh,
    pub coord: Coord,
    /// The whole model's.
    pub whole: Shape,
    /// The same with the heads, the feed-forward width and the vocabulary that this rank has.
    pub shape: Shape,
    /// Tokens whose rows of the embedding, and whose logits, are here.
    pub vocab: Range<usize>,
    /// Experts that are here.
    pub experts: Range<usize>,
    /// What it holds, in the order of the forward pass.
    pub blocks: Vec<BlockParams>,
    /// Of each block, what is exchanged alike, and the run of it whose states this rank keeps.
    pub shards: Vec<Vec<Shard>>,
    /// Which of `blocks` make each stage of this rank; more than one where stages are interleaved.
    pub stages: Vec<Range<usize>>,
}

/// A run of a block's flat buffer whose gradient is summed over one group of ranks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    pub range: Range<usize>,
    /// Summed over those that have the same experts; otherwise over all replicas.
    pub expert: bool,
    /// The token table where the first and the last stage each have one.
    pub tied: bool,
}

/// A unit, and the run of its block's flat buffer whose master, moments and summed gradient are on this rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    pub unit: Unit,
    pub own: Range<usize>,
}

impl Shard {
    /// What of a run of the block's flat buffer is in `own`, counted from where that starts.
    pub fn within(&self, run: Range<usize>) -> Option<Range<usize>> {
        let (from, to) = (run.start.max(self.own.start), run.end.min(self.own.end));
        (from < to).then(|| from - self.own.start..to - self.own.start)
    }
}

impl Part {
    /// All of it.
    pub fn whole(shape: &Shape) -> Part {
        Part::of(shape, &Mesh::ONE, 1, Mesh::ONE.coord(0))
    }

    /// That of the rank at `coord`, whose mesh cuts the model into `pipe × chunks` stages. The sizes fit:
    /// `Plan::resolve` has seen to it.
    pub fn of(shape: &Shape, mesh: &Mesh, chunks: usize, coord: Coord) -> Part {
        let (index, ranks) = (coord.tensor, mesh.tensor);
        let vocab = cut(shape.vocab, ranks, index);
        let experts = shape
            .moe
            .map_or(0..0, |moe| cut(moe.experts, mesh.expert, mesh.replica(coord) % mesh.expert));
        let here = |param: &Param| match param.expert {
            Some(expert) => experts.contains(&expert),
            None => true,
        };
        let all = shape.blocks();
        let (mut blocks, mut stages) = (Vec::new(), Vec::new());
        for chunk in 0..chunks {
            let first = blocks.len();
            let stage = chunk * mesh.pipe + coord.pipe;
            for number in stage_blocks(shape, mesh.pipe * chunks, stage) {
                let params = on_stage(shape, mesh, &all, number)
                    .iter()
                    .filter(|param| here(param))
                    .map(|param| param.on_tensor_rank(index, ranks, shape.kv_heads))
                    .collect();
                blocks.push(BlockParams { params, ..all[number].clone() });
            }
            stages.push(first..blocks.len());
        }
        let cut_shape = Shape {
            vocab: vocab.len(),
            heads: shape.heads / ranks,
            kv_heads: keys_of(shape.kv_heads, ranks, index).len(),
            ffn: shape.ffn / ranks,
            lead: shape.lead.map(|lead| Lead { ffn: lead.ffn / ranks, ..lead }),
            ..shape.clone()
        };
        let shards = blocks.iter().map(|block| shards(block, mesh, coord)).collect();
        Part {
            mesh: *mesh,
            coord,
            whole: shape.clone(),
            shape: cut_shape,
            vocab,
            experts,
            blocks,
            shards,
            stages,
        }
    }

    /// Whether of all ranks that have the same piece of this parameter, this is the one that speaks for it:
    /// counts it in a norm, writes it to a checkpoint.
    pub fn speaks_for(&self, param: &Param) -> bool {
        let Part { mesh, coord, .. } = self;
        let copy = match param.expert {
            Some(_) => mesh.replica(*coord) / (mesh.expert * mesh.expert_shard()),
            None => mesh.replica(*coord) / mesh.shard,
        };
        let on_tensor = match param.split {
            Split::Copied | Split::Norm => coord.tensor == 0,
            Split::Keys => coord.tensor.is_multiple_of(mesh.keys),
            Split::Rows | Split::Cols | Split::Vocab => true,
        };
        copy == 0 && on_tensor && (!param.tied || coord.pipe == 0)
    }

    /// Parameters on this rank before ZeRO cuts them.
    pub fn len(&self) -> usize {
        self.blocks.iter().map(BlockParams::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether this rank's last stage computes the loss.
    pub fn has_head(&self) -> bool {
        self.blocks.last().is_some_and(|block| block.number == self.whole.layers + 1)
    }
}

impl BlockParams {
    /// The runs of this block that are exchanged alike. What is cut unevenly among ranks of the tensor axis
    /// has a unit of its own, so that all others lie alike on all of them.
    pub fn units(&self) -> Vec<Unit> {
        let mut units: Vec<(Unit, Split)> = Vec::new();
        for (start, param) in self.placed() {
            let (end, expert, table) =
                (start + param.len(), param.expert.is_some(), param.split == Split::Vocab);
            match units.last_mut() {
                Some((unit, last)) if unit.expert == expert && !table && *last != Split::Vocab => {
                    unit.range.end = end
                }
                _ => {
                    units.push((Unit { range: start..end, expert, tied: param.tied }, param.split))
                }
            }
        }
        units.into_iter().map(|(unit, _)| unit).collect()
    }
}

/// A block's units, each cut among the ranks that share its states.
fn shards(block: &BlockParams, mesh: &Mesh, coord: Coord) -> Vec<Shard> {
    let replica = mesh.replica(coord);
    let share = |unit: &Unit| {
        let (ranks, index) = match unit.expert {
            true => (mesh.expert_shard(), replica / mesh.expert % mesh.expert_shard()),
            false => (mesh.shard, replica % mesh.shard),
        };
        let own = cut(unit.range.len(), ranks, index);
        unit.range.start + own.start..unit.range.start + own.end
    };
    block.units().into_iter().map(|unit| Shard { own: share(&unit), unit }).collect()
}

/// The blocks of a stage. Layers are dealt out evenly; what is left over goes to the stages between the
/// first and the last, which have the embedding and the head to do.
fn stage_blocks(shape: &Shape, stages: usize, stage: usize) -> Range<usize> {
    let layers_of = |stage: usize| {
        let (each, more) = (shape.layers / stages, shape.layers % stages);
        // The order in which stages are given one more: 1, 2, …, the first, the last.
        let turn = match stage {
            0 => stages.saturating_sub(2),
            last if last + 1 == stages => stages - 1,
            middle => middle - 1,
        };
        each + usize::from(turn < more)
    };
    let before: usize = (0..stage).map(layers_of).sum();
    let first = if stage == 0 { 0 } else { before + 1 };
    let end = before + 1 + layers_of(stage) + usize::from(stage + 1 == stages);
    first..end
}

/// A block's parameters on their stage. On the last of several stages the head has the token table too, when
/// that is the output projection.
fn on_stage(shape: &Shape, mesh: &Mesh, all: &[BlockParams], number: usize) -> Vec<Param> {
    let mut params = all[number].params.clone();
    if shape.tied && mesh.pipe > 1 {
        let tie = |param: &Param| Param { tied: true, ..param.clone() };
        if number == 0 {
            params[0] = tie(&params[0]);
        } else if number + 1 == all.len() {
            params.push(Param { name: "output".into(), ..tie(&all[0].params[0]) });
        }
    }
    params
}
