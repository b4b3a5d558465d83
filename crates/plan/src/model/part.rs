//! The part of a model that one rank holds: its pipeline stages, and its slice of each parameter there.

use std::ops::Range;

use super::params::number_tensors;
use super::{BlockParams, Param, Split};
use crate::cut;
use crate::mesh::{Coord, Mesh};

/// The part of a model that one rank holds, derived from the parameter lists of the model's blocks.
#[derive(Clone, PartialEq, Debug)]
pub struct Part {
    pub mesh: Mesh,
    pub coord: Coord,
    /// This rank's blocks in the order of the forward pass, with its slice of each parameter.
    pub blocks: Vec<BlockParams>,
    /// For each block, its units and the range of each whose optimizer state this rank holds.
    pub shards: Vec<Vec<Shard>>,
    /// Ranges of `blocks` that form this rank's pipeline stages; several if stages are interleaved.
    pub stages: Vec<Range<usize>>,
    /// For each block, the parameter that it shares with another block on this rank.
    pub shared: Vec<Option<SharedParam>>,
    /// Blocks of the whole model.
    pub total_blocks: usize,
}

/// A range of a block's flat buffer whose gradient is reduced over one process group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unit {
    pub range: Range<usize>,
    /// Reduced over the ranks that hold the same experts; otherwise over all replicas.
    pub expert: bool,
    /// Also summed over the first and the last pipeline stage.
    pub tied: bool,
}

/// A unit, and the range of its block's flat buffer whose master weights, moments and reduced gradient are on this
/// rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shard {
    pub unit: Unit,
    pub own: Range<usize>,
}

/// A matrix of another block on the same rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedParam {
    /// Index of that block on this rank.
    pub block: usize,
    /// Range in its flat buffer.
    pub range: Range<usize>,
    pub rows: usize,
    pub cols: usize,
}

impl Shard {
    /// The overlap of `range` with `own`, relative to the start of `own`.
    pub fn within(&self, range: Range<usize>) -> Option<Range<usize>> {
        let (from, to) = (range.start.max(self.own.start), range.end.min(self.own.end));
        (from < to).then(|| from - self.own.start..to - self.own.start)
    }
}

impl Part {
    /// A whole model on one rank.
    pub fn whole(blocks: Vec<BlockParams>) -> Part {
        Part::new(&Mesh::ONE, Mesh::ONE.coord(0), 1, blocks)
    }

    /// The part of the rank at `coord` in a model of `pipe × chunks` pipeline stages. `blocks` lists the parameters
    /// of the whole model: `Shape::blocks` for the built-in families. `Plan::resolve` has checked that the mesh
    /// divides the dimensions.
    pub fn new(mesh: &Mesh, coord: Coord, chunks: usize, mut blocks: Vec<BlockParams>) -> Part {
        number_tensors(&mut blocks);
        if mesh.pipe > 1 {
            copy_tied(&mut blocks);
        }
        let total_blocks = blocks.len();
        let (mut here, mut stages) = (Vec::new(), Vec::new());
        for chunk in 0..chunks {
            let first = here.len();
            let stage = chunk * mesh.pipe + coord.pipe;
            let numbers = stage_blocks(total_blocks, mesh.pipe * chunks, stage);
            here.extend(blocks[numbers].iter().map(|block| on_rank(block, mesh, coord)));
            stages.push(first..here.len());
        }
        Part {
            mesh: *mesh,
            coord,
            shards: here.iter().map(|block| shards(block, mesh, coord)).collect(),
            shared: here.iter().map(|block| shared_param(block, &here)).collect(),
            blocks: here,
            stages,
            total_blocks,
        }
    }

    /// Whether this rank represents a parameter among all ranks that hold the same slice of it, e.g. counts it in a
    /// norm.
    pub fn represents(&self, param: &Param) -> bool {
        let Part { mesh, coord, .. } = self;
        let copy = match param.expert {
            Some(_) => mesh.replica(*coord) / (mesh.expert * mesh.expert_shard()),
            None => mesh.replica(*coord) / mesh.shard,
        };
        let on_tensor = match param.split {
            Split::Replicated | Split::Norm => coord.tensor == 0,
            Split::Keys => coord.tensor.is_multiple_of(mesh.keys),
            Split::Rows | Split::Cols | Split::Vocab => true,
        };
        copy == 0 && on_tensor && (!param.tied || coord.pipe == 0)
    }

    /// Parameters on this rank before ZeRO shards them.
    pub fn len(&self) -> usize {
        self.blocks.iter().map(BlockParams::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a block of this rank is the first of the model, which reads token ids.
    pub fn is_first(&self, block: usize) -> bool {
        self.blocks[block].number == 0
    }

    /// Whether a block of this rank is the last of the model, which computes the loss.
    pub fn is_last(&self, block: usize) -> bool {
        self.blocks[block].number + 1 == self.total_blocks
    }

    /// Whether two blocks of this rank are in the same stage.
    pub fn same_stage(&self, one: usize, other: usize) -> bool {
        self.stages.iter().any(|stage| stage.contains(&one) && stage.contains(&other))
    }

    /// Whether offloading moves a block's activations: all layers but the last of a stage, whose backward pass comes
    /// first.
    pub fn offloads(&self, block: usize) -> bool {
        let next = block + 1;
        let is_layer = !self.is_first(block) && !self.is_last(block);
        is_layer && next < self.blocks.len() && self.same_stage(block, next) && !self.is_last(next)
    }

    /// Whether this rank's last stage computes the loss.
    pub fn has_head(&self) -> bool {
        !self.blocks.is_empty() && self.is_last(self.blocks.len() - 1)
    }
}

impl BlockParams {
    /// The ranges of this block that are reduced over the same group. A parameter that is split unevenly along the
    /// tensor axis has its own unit, so that all other units have the same size on all ranks.
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

/// Gives blocks that share a parameter a copy each, as they are on different pipeline stages.
fn copy_tied(blocks: &mut [BlockParams]) {
    for number in 0..blocks.len() {
        let Some(tied) = blocks[number].tied.take() else { continue };
        let owner = blocks.iter_mut().find(|block| block.name == tied.block);
        let param = owner.and_then(|owner| owner.params.iter_mut().find(|p| p.name == tied.param));
        let param = param.unwrap_or_else(|| panic!("no parameter {}.{}", tied.block, tied.param));
        param.tied = true;
        let copy = Param { name: tied.name, ..param.clone() };
        blocks[number].params.push(copy);
    }
}

/// The slices of a block's parameters on a rank. Experts are divided evenly among the ranks of the expert axis.
fn on_rank(block: &BlockParams, mesh: &Mesh, coord: Coord) -> BlockParams {
    let experts = block.params.iter().filter_map(|param| param.expert).max().map_or(0, |e| e + 1);
    let here = cut(experts, mesh.expert, mesh.replica(coord) % mesh.expert);
    let params = block
        .params
        .iter()
        .filter(|param| param.expert.is_none_or(|expert| here.contains(&expert)))
        .map(|param| param.on_tensor_rank(mesh, coord))
        .collect();
    BlockParams { params, ..block.clone() }
}

/// A block's units, each sharded among the ranks that share its optimizer state.
fn shards(block: &BlockParams, mesh: &Mesh, coord: Coord) -> Vec<Shard> {
    let replica = mesh.replica(coord);
    let shard = |unit: Unit| {
        let (ranks, index) = match unit.expert {
            true => (mesh.expert_shard(), replica / mesh.expert % mesh.expert_shard()),
            false => (mesh.shard, replica % mesh.shard),
        };
        let own = cut(unit.range.len(), ranks, index);
        Shard { own: unit.range.start + own.start..unit.range.start + own.end, unit }
    };
    block.units().into_iter().map(shard).collect()
}

/// The parameter that a block shares with an earlier one of the same rank.
fn shared_param(block: &BlockParams, here: &[BlockParams]) -> Option<SharedParam> {
    let tied = block.tied.as_ref()?;
    let index = here.iter().position(|owner| owner.name == tied.block)?;
    let range = here[index].range(&tied.param);
    let dims = &here[index].get(&tied.param)?.dims;
    Some(SharedParam { block: index, range, rows: dims[0], cols: dims[1] })
}

/// The blocks of a stage. Blocks between the first and the last are divided evenly; the remainder goes to the stages
/// in the middle, as the first and the last stage also have the embedding and the head.
fn stage_blocks(blocks: usize, stages: usize, stage: usize) -> Range<usize> {
    let middle = blocks.saturating_sub(2);
    let (each, more) = (middle / stages, middle % stages);
    let layers_of = |stage: usize| {
        // The order in which stages get one more: 1, 2, …, the first, the last.
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
    first..end.min(blocks)
}
