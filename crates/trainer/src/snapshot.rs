//! A rank's state to and from a checkpoint: a snapshot of what this rank writes, and its slices of what others
//! wrote, on whatever layout. Does no files itself.

use std::collections::HashMap;
use std::ops::Range;

use lockstep_ckpt::{Checkpoint, Named, Piece, TensorKind, Tensors, params_of};
use lockstep_kernels::{Device, Dtype, View};
use lockstep_model::Weights;
use lockstep_parallel::compress::CompressorState;
use lockstep_plan::model::{Part, Shape, Slice};
use lockstep_plan::reduction::Gather;
use lockstep_plan::{Compression, Plan};

use crate::{Error, Rank};

/// A whole model's tensors of one kind, in host memory.
pub struct Whole {
    list: Vec<Named>,
    values: HashMap<String, Vec<f32>>,
}

impl Tensors for Whole {
    fn list(&self) -> &[Named] {
        &self.list
    }

    fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        out.copy_from_slice(self.get(name));
        Ok(())
    }
}

impl Whole {
    /// A tensor's values.
    pub fn get(&self, name: &str) -> &[f32] {
        self.values.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Their names and sizes, in the order of the forward pass.
    pub fn names(&self) -> &[Named] {
        &self.list
    }
}

/// What each rank has of its own, where gradients are compressed.
const OWN: [(TensorKind, CompressorState); 2] = [
    (TensorKind::Residual, CompressorState::Residual),
    (TensorKind::Magnitude, CompressorState::MeanSquares),
];

/// What a rank writes into a checkpoint, in host memory: the training may go on.
#[derive(Default)]
pub struct Snapshot {
    pub pieces: Vec<Piece>,
    /// One piece after the other.
    pub values: Vec<f32>,
}

impl Snapshot {
    /// Nothing yet, but with memory for so many elements that has been touched.
    pub fn with_room(elements: usize) -> Snapshot {
        let mut values = vec![0.0; elements];
        // Fresh memory is the system's until something is written there, page by page.
        values.iter_mut().step_by(1024).for_each(|value| *value = std::hint::black_box(1.0));
        Snapshot { pieces: vec![], values }
    }
}

impl Rank<'_> {
    /// Elements of a snapshot, before anything is owed.
    pub fn snapshot_len(&self) -> usize {
        3 * self.model.part.written().iter().map(|slice| slice.here.len()).sum::<usize>()
    }

    /// Copies what this rank writes into a checkpoint; into the memory of an earlier snapshot, so that only the
    /// first one has to ask the system for it.
    pub fn snapshot(&self, earlier: Snapshot) -> Snapshot {
        let Snapshot { mut pieces, mut values } = earlier;
        let written = self.model.part.written();
        pieces.clear();
        for kind in [TensorKind::Param, TensorKind::First, TensorKind::Second] {
            pieces.extend(written.iter().map(|slice| piece(kind, slice)));
        }
        let own: Vec<(Piece, View<'_>)> = OWN.into_iter().flat_map(|own| self.own(own)).collect();
        pieces.extend(own.iter().map(|(piece, _)| piece.clone()));
        values.resize(pieces.iter().map(Piece::len).sum(), 0.0);

        let mut rest = &mut values[..];
        for kind in [TensorKind::Param, TensorKind::First, TensorKind::Second] {
            for slice in &written {
                let (to, later) = rest.split_at_mut(slice.here.len());
                let own = self.state(kind, slice.block, slice.unit);
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

    /// This rank's run of a unit.
    fn state(&self, kind: TensorKind, block: usize, unit: usize) -> View<'_> {
        match kind {
            TensorKind::Param => self.store.weights.own(block, unit),
            TensorKind::First => self.optimizer.moments(block, unit).0,
            TensorKind::Second => self.optimizer.moments(block, unit).1,
            TensorKind::Residual | TensorKind::Magnitude => panic!("{kind} is no state of a unit"),
        }
    }

    /// What this rank remembers of its own of its gradients, tensor by tensor.
    fn own(&self, (kind, what): (TensorKind, CompressorState)) -> Vec<(Piece, View<'_>)> {
        let mut all = Vec::new();
        for (block, run, values) in self.store.reduction.compressor_state(what) {
            for (start, param) in self.model.part.blocks[block].placed() {
                let Some(common) = common(&run, start..start + param.len()) else { continue };
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

    /// All parameters, at the first rank; the others help. All ranks call it.
    pub fn params(&self) -> Result<Option<Whole>, Error> {
        // What this rank speaks for, slice after slice.
        let mut mine = Vec::new();
        for slice in self.model.part.written() {
            let (own, start) = (self.state(TensorKind::Param, slice.block, slice.unit), mine.len());
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
                let whole =
                    values.get_mut(&slice.name).expect("every rank has this model's tensors");
                for run in slice.runs.iter().flat_map(|runs| runs.ranges()) {
                    whole[run.clone()].copy_from_slice(&mine[at..at + run.len()]);
                    at += run.len();
                }
            }
        }
        Ok(Some(Whole { list, values }))
    }

    /// Takes over the moments of a checkpoint, and what was not sent, if it has them.
    pub(crate) fn load_states(&mut self, checkpoint: &Checkpoint) -> Result<(), Error> {
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
        OWN.into_iter().try_for_each(|own| self.load_own(checkpoint, own))
    }

    /// On the layout that wrote it each rank takes its own, to the bit. On another one the sum over all ranks is what
    /// matters: of what is owed one of them takes it, of what is usual all do.
    fn load_own(
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
                "gradients are not compressed any more: what the checkpoint's ranks had not sent of them is left \
                 out, one step's rounding or selection"
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
                let Some(common) = common(&run, start..start + param.len()) else { continue };
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

    /// Whether all that hold the same parameters hold the same bits.
    pub(crate) fn check_equal(&self) -> Result<(), Error> {
        let (mut hashes, mut values) = ([0u64; 2], Vec::new());
        let part = &self.model.part;
        for (block, units) in part.shards.iter().enumerate() {
            for (unit, shard) in units.iter().enumerate() {
                let hash = &mut hashes[usize::from(shard.unit.expert)];
                let own = self.store.weights.own(block, unit);
                values.resize(own.len(), 0.0f32);
                self.device.read(own, &mut values);
                *hash = values.iter().fold(*hash, |hash, value| {
                    (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
                });
            }
        }
        use lockstep_plan::GroupKind::{Copies, ExpertCopies};
        for (kind, hash) in [Copies, ExpertCopies].into_iter().zip(hashes) {
            let group = self.groups.group(kind);
            let mut all = vec![0i64; group.size()];
            group.all_gather(&[hash as i64], &mut all)?;
            if let Some(other) = all.iter().position(|other| *other != all[0]) {
                return Err(Error::Mistake(format!(
                    "rank {} starts from other parameters than rank {}; give all ranks the same \
                     run file, seed and checkpoint",
                    group.members()[other],
                    group.members()[0]
                )));
            }
        }
        Ok(())
    }
}

fn piece(kind: TensorKind, slice: &Slice) -> Piece {
    let named = Named { name: slice.name.clone(), dims: slice.dims.clone() };
    Piece { kind, named, runs: slice.runs.clone(), counts: true }
}

/// What two ranges have in common.
fn common(one: &Range<usize>, other: Range<usize>) -> Option<Range<usize>> {
    let (from, to) = (one.start.max(other.start), one.end.min(other.end));
    (from < to).then_some(from..to)
}

/// A rank's piece of the parameters of a checkpoint or of any other list of tensors.
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

/// The same of a whole model, for a rank by itself.
pub fn load_whole(
    device: &Device,
    shape: &Shape,
    dtype: Dtype,
    from: &dyn Tensors,
) -> Result<Weights, Error> {
    load_weights(device, &Part::whole(shape.blocks()), dtype, Gather::Never, from)
}
