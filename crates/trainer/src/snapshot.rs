//! State of a rank as tensors of a checkpoint: takes snapshots, and loads shards from checkpoints of any layout. Does
//! not write files.

use std::collections::HashMap;
use std::ops::Range;

use lockstep_ckpt::{Checkpoint, Named, Piece, TensorKind, Tensors, params_of};
use lockstep_kernels::{Device, DeviceType, Dtype, Tag, Tensor, Transfer, View};
use lockstep_model::Weights;
use lockstep_parallel::Storage;
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

/// Copy of a rank's part of a checkpoint in host memory, which may still be on its way there.
#[derive(Default)]
pub struct Snapshot {
    pub pieces: Vec<Piece>,
    /// Values of all pieces, concatenated.
    values: Values,
    /// Moves a copy of the state in device memory to the host.
    pending: Option<Box<Transfer>>,
}

/// Host memory of a snapshot.
enum Values {
    Pageable(Vec<f32>),
    /// Page-locked, which a GPU copies to while it computes. Owned by the transfer while it is in flight.
    Pinned(Tensor),
    InFlight,
}

impl Default for Values {
    fn default() -> Values {
        Values::Pageable(Vec::new())
    }
}

impl Values {
    fn allocate(device: &Device, elements: usize) -> Values {
        if device.device_type() == DeviceType::Cuda {
            let pinned = device.try_empty_offloaded([1, elements], Dtype::F32, Tag::Buffers);
            match pinned {
                Ok(pinned) => return Values::Pinned(pinned),
                Err(error) => tracing::warn!(
                    "checkpoints are copied through pageable memory, which is slower: {error}"
                ),
            }
        }
        let mut values = vec![0.0; elements];
        // Writes to each page, so that the system allocates it now.
        values.iter_mut().step_by(1024).for_each(|value| *value = std::hint::black_box(1.0));
        Values::Pageable(values)
    }

    /// This memory if it has the right size, otherwise other memory.
    fn fitted(self, device: &Device, elements: usize) -> Values {
        match self {
            Values::Pageable(mut values) if device.device_type() == DeviceType::Cpu => {
                values.resize(elements, 0.0);
                Values::Pageable(values)
            }
            Values::Pageable(values) if values.len() == elements => Values::Pageable(values),
            Values::Pinned(values) if values.len() == elements => Values::Pinned(values),
            _ => Values::allocate(device, elements),
        }
    }

    fn get_mut(&mut self) -> &mut [f32] {
        match self {
            Values::Pageable(values) => values,
            Values::Pinned(values) => values.view_mut().host(),
            Values::InFlight => panic!("the values of the snapshot are in flight"),
        }
    }
}

impl Snapshot {
    /// An empty snapshot with memory for `elements` elements.
    pub fn with_capacity(device: &Device, elements: usize) -> Snapshot {
        Snapshot { values: Values::allocate(device, elements), ..Snapshot::default() }
    }

    /// Waits until all values are in host memory.
    pub fn complete(&mut self) {
        if let Some(transfer) = self.pending.take() {
            // Returns the copy's device memory to the pool.
            let (_, values) = transfer.wait();
            self.values = Values::Pinned(values);
        }
    }

    /// The snapshot with all values in host memory.
    pub fn completed(mut self) -> Snapshot {
        self.complete();
        self
    }

    /// Values of all pieces, concatenated.
    ///
    /// # Panics
    /// If they are still in flight.
    pub fn values(&self) -> &[f32] {
        match &self.values {
            Values::Pageable(values) => values,
            Values::Pinned(values) => values.view().host(),
            Values::InFlight => panic!("the values of the snapshot are in flight"),
        }
    }

    /// Bytes of host memory.
    pub fn bytes(&self) -> usize {
        let elements: usize = match &self.values {
            Values::Pageable(values) => values.capacity(),
            Values::Pinned(values) => values.len(),
            Values::InFlight => self.pieces.iter().map(Piece::len).sum(),
        };
        elements * size_of::<f32>()
    }
}

impl Rank<'_> {
    /// Number of elements of a snapshot.
    pub fn snapshot_len(&self) -> usize {
        Ledger::of(self.plan, self.group.rank()).snapshot / size_of::<f32>()
    }

    /// Copies this rank's part of a checkpoint. Reuses the memory of the previous snapshot.
    ///
    /// On a GPU with room for a copy of the state, the copy is made there, and moved to the host while training continues.
    /// The room is memory that is free now: a copy is never required, and not part of the ledger. Otherwise the state is
    /// copied to the host before this returns.
    pub fn snapshot(&self, previous: Snapshot) -> Snapshot {
        self.snapshot_through(previous, |bytes| self.device.has_room(bytes))
    }

    /// Takes a snapshot through a copy in device memory if there is room for its bytes, or directly.
    fn snapshot_through(
        &self,
        previous: Snapshot,
        has_room: impl FnOnce(usize) -> bool,
    ) -> Snapshot {
        let Snapshot { mut pieces, values, .. } = previous;
        pieces.clear();
        let mut copies: Vec<(View<'_>, Range<usize>)> = Vec::new();
        let written = self.model.part.written();
        let mut end = 0;
        for kind in [TensorKind::Param, TensorKind::First, TensorKind::Second] {
            pieces.extend(written.iter().map(|slice| piece(kind, slice)));
            // Neighbors are copied together.
            let follows = |a: &Slice, b: &Slice| {
                (a.block, a.unit, a.here.end) == (b.block, b.unit, b.here.start)
            };
            for run in written.chunk_by(follows) {
                let (first, last) = (&run[0], &run[run.len() - 1]);
                let own = self.shard(kind, first.block, first.unit);
                let own = own.part(first.here.start..last.here.end);
                copies.push((own, end..end + own.len()));
                end += own.len();
            }
        }
        for (piece, own) in
            COMPRESSOR_STATE.into_iter().flat_map(|state| self.compressor_pieces(state))
        {
            pieces.push(piece);
            copies.push((own, end..end + own.len()));
            end += own.len();
        }
        let mut values = values.fitted(&self.device, end);
        let staged = match &values {
            Values::Pinned(_) if has_room(end * size_of::<f32>()) => {
                self.device.try_empty([1, end], Dtype::F32, Tag::Buffers).ok()
            }
            _ => None,
        };
        let Some(mut staged) = staged else {
            let to = values.get_mut();
            copies.into_iter().for_each(|(own, range)| self.device.read(own, &mut to[range]));
            return Snapshot { pieces, values, pending: None };
        };
        for (own, range) in copies {
            self.device.copy(own, staged.view_mut().part(range));
        }
        let Values::Pinned(values) = values else { unreachable!("staged only if it is pinned") };
        let transfer = self.device.transfer(staged, 0..end, values, 0, &self.device.record());
        Snapshot { pieces, values: Values::InFlight, pending: Some(Box::new(transfer)) }
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
    ///
    /// # Panics
    /// If updates are pending, see [`Rank::settle`].
    pub fn params(&self) -> Result<Option<HostTensors>, Error> {
        assert!(self.optimizer.is_settled(), "updates are pending; call Rank::settle first");
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
    storage: Storage,
    from: &dyn Tensors,
) -> Result<Weights, Error> {
    let mut failed = None;
    let weights = Weights::load(device, part, storage, |param, runs, out| {
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
    let storage = Storage::on_device(dtype, Gather::Never);
    load_weights(device, &Part::whole(shape.blocks()), storage, from)
}

#[cfg(test)]
mod tests {
    use lockstep_comm::on_threads;
    use lockstep_plan::{Config, Environment};

    use super::*;

    /// A copy in device memory gives the same values as a direct copy, also if training has gone on since.
    #[test]
    fn snapshots_through_a_copy_on_the_device_are_the_same() {
        let sets = ["model.vocab=64", "layout.data=2", "layout.zero=1", "precision.compute=bf16"];
        let config = Config::parse("", &sets.map(String::from));
        let plan = Plan::resolve(&config, &Environment::one_host(2, 1)).unwrap();
        on_threads(2, |world| {
            let mut rank = Rank::new(&plan, &world, Device::from_env(1)).unwrap();
            let (device, len) = (rank.device.clone(), rank.snapshot_len());
            let before = device.memory().of(Tag::Buffers).now;
            let direct = rank.snapshot_through(Snapshot::default(), |_| false);
            let pinned = device.empty_offloaded(1, len, Dtype::F32, Tag::Buffers);
            let host_bytes = device.offloaded_memory().of(Tag::Buffers).now;
            let previous = Snapshot { values: Values::Pinned(pinned), ..Snapshot::default() };
            let mut staged = rank.snapshot_through(previous, |_| true);
            assert!(staged.pending.is_some());
            assert_eq!(device.memory().of(Tag::Buffers).now, 4 * len + before);
            let (first, _) = rank.optimizer.moments_mut(0, 0);
            device.fill(first.view_mut(), 7.0);
            let (master, _) = rank.store.weights.own_mut(0, 0);
            device.fill(master, 7.0);
            staged.complete();
            assert_eq!(device.memory().of(Tag::Buffers).now, before);
            assert_eq!(staged.values(), direct.values());
            assert_eq!(staged.pieces, direct.pieces);
            // The memory is used again.
            let again = rank.snapshot_through(staged, |_| true);
            assert_eq!(device.offloaded_memory().of(Tag::Buffers).peak, host_bytes);
            drop(again);
        });
    }
}
