//! State of a rank as tensors of a checkpoint: takes snapshots, and loads shards from checkpoints of any layout. Does
//! not write files.

use std::collections::HashMap;
use std::ops::Range;

use lockstep_ckpt::{Checkpoint, Named, Piece, TensorKind, Tensors, params_of};
use lockstep_kernels::{Device, Dtype, View};
use lockstep_model::Weights;
use lockstep_parallel::compress::CompressorState;
use lockstep_plan::model::{Part, Shape, Slice};
use lockstep_plan::reduction::Gather;
use lockstep_plan::{Compression, Ledger, Plan};

use crate::{Error, Rank};

/// Unsharded tensors of a model in host memory.
pub struct HostTensors {
    list: Vec<Named>,
    values: HashMap<String, Vec<f32>>,
}

impl Tensors for HostTensors {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        out.copy_from_slice(self.get(name));
        Ok(())
    }
}

impl HostTensors {
    /// Values of a tensor. Panics if there is no such tensor.
    pub fn get(&self, name: &str) -> &[f32] {
        self.values.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Names and shapes, in the order of the forward pass.
    pub fn names(&self) -> &[Named] {
        &self.list
    }
}

/// State of gradient compression, which is different on each rank.
const COMPRESSOR_STATE: [(TensorKind, CompressorState); 2] = [
    (TensorKind::Residual, CompressorState::Residual),
    (TensorKind::Magnitude, CompressorState::MeanSquares),
];

/// Copy of a rank's part of a checkpoint in host memory.
#[derive(Default)]
pub struct Snapshot {
    pub pieces: Vec<Piece>,
    /// Values of all pieces, concatenated.
    pub values: Vec<f32>,
}

impl Snapshot {
    /// An empty snapshot with memory for `elements` elements.
    pub fn with_capacity(elements: usize) -> Snapshot {
        let mut values = vec![0.0; elements];
        // Writes to each page, so that the system allocates it now.
        values.iter_mut().step_by(1024).for_each(|value| *value = std::hint::black_box(1.0));
        Snapshot { pieces: vec![], values }
    }
}

impl Rank<'_> {
    /// Number of elements of a snapshot.
    pub fn snapshot_len(&self) -> usize {
        Ledger::of(self.plan, self.group.rank()).snapshot / size_of::<f32>()
    }

    /// Copies this rank's part of a checkpoint. Reuses the memory of the previous snapshot.
    pub fn snapshot(&self, previous: Snapshot) -> Snapshot {
        let Snapshot { mut pieces, mut values } = previous;
        let written = self.model.part.written();
        pieces.clear();
        for kind in [TensorKind::Param, TensorKind::First, TensorKind::Second] {
            pieces.extend(written.iter().map(|slice| piece(kind, slice)));
        }
        let own: Vec<(Piece, View<'_>)> =
            COMPRESSOR_STATE.into_iter().flat_map(|state| self.compressor_pieces(state)).collect();
        pieces.extend(own.iter().map(|(piece, _)| piece.clone()));
        values.resize(pieces.iter().map(Piece::len).sum(), 0.0);

        let mut rest = &mut values[..];
        for kind in [TensorKind::Param, TensorKind::First, TensorKind::Second] {
            for slice in &written {
                let (to, later) = rest.split_at_mut(slice.here.len());
                let own = self.shard(kind, slice.block, slice.unit);
                self.device.read(own.part(slice.here.clone()), to);
                rest = later;
            }
        }
        for (_, own) in own {
            let (to, later) = rest.split_at_mut(own.len());
            self.device.read(own, to);
            rest = later;
        }
        Snapshot { pieces, values }
    }

    /// This rank's shard of a unit.
    fn shard(&self, kind: TensorKind, block: usize, unit: usize) -> View<'_> {
        match kind {
            TensorKind::Param => self.store.weights.own(block, unit),
            TensorKind::First => self.optimizer.moments(block, unit).0,
            TensorKind::Second => self.optimizer.moments(block, unit).1,
            TensorKind::Residual | TensorKind::Magnitude => {
                panic!("{kind} is not sharded by units")
            }
        }
    }

    /// Compressor state of this rank, by tensor.
    fn compressor_pieces(
        &self,
        (kind, what): (TensorKind, CompressorState),
    ) -> Vec<(Piece, View<'_>)> {
        let mut all = Vec::new();
        for (block, run, values) in self.store.reduction.compressor_state(what) {
            for (start, param) in self.model.part.blocks[block].placed() {
                let Some(common) = intersect(&run, start..start + param.len()) else { continue };
                let piece = Piece {
                    kind,
                    named: Named { name: param.whole.name.clone(), dims: param.whole.dims.clone() },
                    runs: param.place().part(common.start - start..common.end - start),
                    counts: self.model.part.counts_residual(param, self.groups.sequence),
                };
                all.push((piece, values.part(common.start - run.start..common.end - run.start)));
            }
        }
        all
    }

    /// Gathers all parameters on rank 0; returns `None` on the others. Collective.
    pub fn params(&self) -> Result<Option<HostTensors>, Error> {
        // Slices that this rank writes to checkpoints, concatenated.
        let mut mine = Vec::new();
        for slice in self.model.part.written() {
            let (own, start) = (self.shard(TensorKind::Param, slice.block, slice.unit), mine.len());
            mine.resize(start + slice.here.len(), 0.0);
            self.device.read(own.part(slice.here), &mut mine[start..]);
        }
        if self.group.rank() != 0 {
            self.group.send(&mine, 0)?;
            return Ok(None);
        }
        let list = params_of(&self.plan.model);
        let mut values: HashMap<String, Vec<f32>> =
            list.iter().map(|named| (named.name.clone(), vec![0.0; named.len()])).collect();
        for rank in 0..self.group.size() {
            let theirs = self.plan.part(rank).written();
            if rank > 0 {
                mine.resize(theirs.iter().map(|slice| slice.here.len()).sum(), 0.0);
                self.group.receive(&mut mine, rank)?;
            }
            let mut at = 0;
            for slice in theirs {
                let whole = values.get_mut(&slice.name).expect("a tensor of the model");
                for run in slice.runs.iter().flat_map(|runs| runs.ranges()) {
                    whole[run.clone()].copy_from_slice(&mine[at..at + run.len()]);
                    at += run.len();
                }
            }
        }
        Ok(Some(HostTensors { list, values }))
    }

    /// Loads the state of a checkpoint other than the parameters, as far as it has it.
    pub(crate) fn load_states(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let extra = &checkpoint.head().extra;
        let experts = self.plan.model.moe.map_or(0, |moe| self.plan.model.layers * moe.experts);
        if ![0, experts].contains(&extra.expert_slots.len()) {
            return Err(Error::Invalid(format!(
                "{} has the loads of {} experts, but the model has {experts}; choose another checkpoint",
                checkpoint.dir().display(),
                extra.expert_slots.len()
            )));
        }
        self.extra = extra.clone();
        let mut values = Vec::new();
        for kind in [TensorKind::First, TensorKind::Second] {
            if checkpoint.tensors(kind).is_none() {
                continue;
            }
            for slice in self.model.part.slices() {
                values.resize(slice.here.len(), 0.0);
                checkpoint.read(kind, &slice.name, &slice.runs, &mut values)?;
                let (first, second) = self.optimizer.moments_mut(slice.block, slice.unit);
                let to = if kind == TensorKind::First { first } else { second };
                self.device.write(to.view_mut().part(slice.here), &values);
            }
        }
        COMPRESSOR_STATE
            .into_iter()
            .try_for_each(|state| self.load_compressor_state(checkpoint, state))
    }

    /// On the layout that saved it, each rank loads its own state, bit for bit. On another layout the sum over all
    /// ranks is loaded: residuals by one rank, mean squares by all.
    fn load_compressor_state(
        &mut self,
        checkpoint: &Checkpoint,
        (kind, what): (TensorKind, CompressorState),
    ) -> Result<(), Error> {
        if checkpoint.tensors(kind).is_none() {
            return Ok(());
        }
        let compresses = self.plan.comm.compression != Compression::None;
        let dropped = !compresses || self.groups.mesh.replicas() == 1;
        if dropped && what == CompressorState::Residual && self.group.rank() == 0 {
            tracing::warn!(
                "gradients are no longer compressed: the residuals of the checkpoint are dropped, which loses the \
                 compression error of one step"
            );
        }
        let before: Option<Plan> = serde_json::from_value(checkpoint.head().plan.clone()).ok();
        let same = before.is_some_and(|before| {
            before.layout == self.plan.layout && before.ranks == self.plan.ranks
        });
        let (rank, sequence, part) = (self.group.rank(), self.groups.sequence, &self.model.part);
        let mut failed = None;
        self.store.reduction.load_compressor_state(&self.device, what, |block, run, to| {
            to.fill(0.0);
            for (start, param) in part.blocks[block].placed() {
                let Some(common) = intersect(&run, start..start + param.len()) else { continue };
                let runs = param.place().part(common.start - start..common.end - start);
                let to = &mut to[common.start - run.start..common.end - run.start];
                let name = &param.whole.name;
                let read = match same {
                    true => checkpoint.read_of_rank(kind, rank, name, &runs, to).map(drop),
                    false
                        if what == CompressorState::MeanSquares
                            || part.takes_residual(param, sequence) =>
                    {
                        checkpoint.sum_over_ranks(kind, name, &runs, to)
                    }
                    false => Ok(()),
                };
                failed = failed.take().or(read.err());
            }
        });
        failed.map_or(Ok(()), |error| Err(error.into()))
    }
}

fn piece(kind: TensorKind, slice: &Slice) -> Piece {
    let named = Named { name: slice.name.clone(), dims: slice.dims.clone() };
    Piece { kind, named, runs: slice.runs.clone(), counts: true }
}

/// Intersection of two ranges.
fn intersect(one: &Range<usize>, other: Range<usize>) -> Option<Range<usize>> {
    let (from, to) = (one.start.max(other.start), one.end.min(other.end));
    (from < to).then_some(from..to)
}

/// Loads a rank's shards of the parameters from a checkpoint or any other list of tensors.
pub fn load_weights(
    device: &Device,
    part: &Part,
    dtype: Dtype,
    gather: Gather,
    from: &dyn Tensors,
) -> Result<Weights, Error> {
    let mut failed = None;
    let weights = Weights::load(device, part, dtype, gather, |param, runs, out| {
        if failed.is_none() {
            failed = from.read_runs(&param.whole.name, runs, out).err();
        }
    });
    failed.map_or(Ok(weights), |error| Err(error.into()))
}

/// Loads all parameters of a model on one rank.
pub fn load_whole(
    device: &Device,
    shape: &Shape,
    dtype: Dtype,
    from: &dyn Tensors,
) -> Result<Weights, Error> {
    load_weights(device, &Part::whole(shape.blocks()), dtype, Gather::Never, from)
}
