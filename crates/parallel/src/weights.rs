//! The parameters of a rank: one flat buffer per block in the compute type, and f32 masters for the optimizer.
//!
//! | ZeRO | compute copy | masters (f32) |
//! |---|---|---|
//! | 0 | whole | whole |
//! | 1, 2 | whole | this rank's shard |
//! | 3 | gathered block by block, and released | this rank's shard |
//!
//! If the compute type is f32, the master is the compute copy itself, or this rank's shard of it.
//!
//! Offloaded masters are stored in host memory, whatever the compute type; the device has only the compute copy.

use std::ops::Range;

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Pending, Result};
use lockstep_kernels::{Device, Dtype, Event, RandomKey, Tag, Tensor, View, ViewMut};
use lockstep_plan::GroupKind;
use lockstep_plan::model::{BlockParams, Init, Param, Part, Runs, Shard};
use lockstep_plan::reduction::{Gather, PassKind, RankReductions, StateOp, gather_group};

use crate::store::{StateLog, record};
use crate::{Groups, collectives};

/// Parameters by block.
pub struct Weights {
    /// The parameters of each block, in the order of its flat buffer.
    pub layout: Vec<BlockParams>,
    blocks: Vec<Block>,
    dtype: Dtype,
    gather: Gather,
    offload: bool,
    /// The policy that says which blocks to gather ahead, and the device of the communication thread, if any.
    prefetch: Option<(RankReductions, Device)>,
    pub(crate) log: Option<StateLog>,
}

struct Block {
    /// The whole buffer; with ZeRO-3 only while it is gathered.
    full: Option<Tensor>,
    /// A gather in flight.
    incoming: Option<Pending<Result<(Tensor, Event)>>>,
    units: Vec<UnitState>,
}

/// This rank's state of a unit.
struct UnitState {
    shard: Shard,
    /// f32 master of the shard; none if the whole buffer is the master.
    master: Option<Tensor>,
    /// The shard in the compute type, if that is not the master and the whole buffer is not permanent.
    copy: Option<Tensor>,
    /// With offloaded masters: the shard in the compute type in host memory, on its way to the device. None if that is
    /// the master.
    outgoing: Option<Tensor>,
}

/// Which parameters of a rank are stored where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Storage {
    /// The compute type.
    pub dtype: Dtype,
    pub gather: Gather,
    /// Masters are stored in host memory.
    pub offload: bool,
}

impl Storage {
    /// Parameters on the device.
    pub fn on_device(dtype: Dtype, gather: Gather) -> Storage {
        Storage { dtype, gather, offload: false }
    }
}

/// This rank's shard of a unit in host memory, to be updated by the optimizer.
pub struct HostShard<'a> {
    pub master: ViewMut<'a>,
    /// Receives the updated parameters in the compute type, if that is not f32.
    pub copy: Option<ViewMut<'a>>,
}

impl Weights {
    /// Random parameters. Each element is a function of (seed, tensor, index in the whole tensor), so that all layouts
    /// start with the same values.
    pub fn init(device: &Device, part: &Part, storage: Storage, seed: u64) -> Weights {
        Weights::new(device, part, storage, |block, _, mut buffer| {
            for (start, param) in block.placed() {
                let mut place = buffer.reborrow().part(start..start + param.len());
                match param.init {
                    Init::Zeros => device.fill(place, 0.0),
                    Init::Ones => device.fill(place, 1.0),
                    Init::Normal(std) => param.runs().for_each(|(first, run)| {
                        let to = place.reborrow().part(run);
                        let key = RandomKey { seed, stream: param.whole.number };
                        device.normal(to, key, first as u64, std);
                    }),
                }
            }
        })
    }

    /// Loads parameters: `read` is called with a tensor, the elements that this rank needs, and a buffer for them.
    pub fn load(
        device: &Device,
        part: &Part,
        storage: Storage,
        mut read: impl FnMut(&Param, &[Runs], &mut [f32]),
    ) -> Weights {
        let mut values = Vec::new();
        Weights::new(device, part, storage, |block, needed, mut buffer| {
            for (start, param) in block.placed() {
                for range in needed {
                    let (from, to) = (start.max(range.start), (start + param.len()).min(range.end));
                    if from < to {
                        values.resize(to - from, 0.0);
                        let runs = param.place().part(from - start..to - start);
                        read(param, &runs, &mut values);
                        device.write(buffer.reborrow().part(from..to), &values);
                    }
                }
            }
        })
    }

    /// `fill` writes each block's f32 values in the ranges that this rank needs.
    fn new(
        device: &Device,
        part: &Part,
        storage: Storage,
        mut fill: impl FnMut(&BlockParams, &[Range<usize>], ViewMut<'_>),
    ) -> Weights {
        let Storage { dtype, gather, offload } = storage;
        let blocks = part.blocks.iter().zip(&part.shards).map(|(layout, shards)| {
            let permanent = !gather.shards_parameters();
            let is_copy = permanent && dtype == Dtype::F32;
            let tag = if is_copy { Tag::Parameters } else { Tag::Buffers };
            let mut values = device.empty(1, layout.len(), Dtype::F32, tag);
            let needed: Vec<Range<usize>> = match permanent {
                true => std::iter::once(0..layout.len()).collect(),
                false => shards.iter().map(|shard| shard.own.clone()).collect(),
            };
            fill(layout, &needed, values.view_mut());
            let unit = |shard| UnitState::new(device, shard, &values, storage);
            let units = shards.iter().map(unit).collect();
            let full = permanent.then(|| {
                if dtype == Dtype::F32 {
                    return values;
                }
                let mut copy = device.empty(1, layout.len(), dtype, Tag::Parameters);
                device.cast(values.view(), copy.view_mut());
                copy
            });
            Block { full, incoming: None, units }
        });
        let blocks = blocks.collect();
        let layout = part.blocks.clone();
        Weights { layout, blocks, dtype, gather, offload, prefetch: None, log: None }
    }

    /// Follows a policy: blocks are gathered ahead if it says so.
    pub(crate) fn follow(&mut self, device: &Device, reductions: &RankReductions) {
        assert_eq!(
            self.gather, reductions.policy.gather,
            "parameters are stored as the policy says"
        );
        let prefetches = reductions.policy.prefetches();
        self.prefetch = prefetches.then(|| (reductions.clone(), device.background()));
    }

    /// Gathers a block for a pass, unless it is gathered, and starts to gather the next one if the policy prefetches.
    ///
    /// ZeRO-3: an all-gather, (P-1)/P of the block per rank. Otherwise nothing.
    pub fn gather(&mut self, device: &Device, groups: &Groups, block: usize, pass: PassKind) {
        if !self.gather.shards_parameters() {
            return;
        }
        if self.blocks[block].full.is_none() {
            let incoming = self.blocks[block].incoming.take();
            let gathered = groups.timed(CommAxis::Data, || match incoming {
                // Only the device waits for the end of the gather.
                Some(task) => task.wait().map(|(full, done)| {
                    device.wait_for(&done);
                    full
                }),
                None => {
                    record(&self.log, StateOp::Gather { block });
                    self.gather_block(device, groups, block)(device)
                }
            });
            let full = gathered.unwrap_or_else(|error| {
                // The pass goes on with zeros; the step fails at its end.
                groups.record(Err(error));
                device.zeros(1, self.layout[block].len(), self.dtype, Tag::Buffers)
            });
            self.blocks[block].full = Some(full);
        }
        let Some((reductions, background)) = &self.prefetch else { return };
        let Some(next) = reductions.prefetch(block, pass) else { return };
        if self.blocks[next].full.is_none() && self.blocks[next].incoming.is_none() {
            record(&self.log, StateOp::Gather { block: next });
            let gather = self.gather_block(device, groups, next);
            let (ready, background) = (device.record(), background.clone());
            let pending = groups.group(GroupKind::Gather).start(move |_| {
                // The buffer may have been used by operations before.
                background.wait_for(&ready);
                let gathered = gather(&background);
                if gathered.is_err() {
                    background.synchronize();
                }
                gathered.map(|full| (full, background.record()))
            });
            self.blocks[next].incoming = Some(pending);
        }
    }

    /// Ends a pass over a block: frees it if the policy says so.
    pub fn release(&mut self, block: usize, pass: PassKind) {
        if self.gather.releases_after(pass) && self.blocks[block].full.take().is_some() {
            record(&self.log, StateOp::Release { block });
        }
    }

    /// Frees all gathered blocks.
    pub fn release_all(&mut self) {
        if !self.gather.shards_parameters() {
            return;
        }
        for (number, block) in self.blocks.iter_mut().enumerate() {
            // A gather in flight may hold values from before the optimizer step.
            let incoming = block.incoming.take().and_then(|task| task.wait().ok());
            let incoming = incoming.map(|(full, done)| {
                done.wait();
                full
            });
            if block.full.take().or(incoming).is_some() {
                record(&self.log, StateOp::Release { block: number });
            }
        }
    }

    /// The all-gathers of a block, ready to run with the device of the thread that runs them.
    fn gather_block(
        &self,
        device: &Device,
        groups: &Groups,
        block: usize,
    ) -> impl FnOnce(&Device) -> Result<Tensor> + Send + 'static + use<> {
        let mut full = device.empty(1, self.layout[block].len(), self.dtype, Tag::Buffers);
        let units: Vec<_> = self.blocks[block]
            .units
            .iter()
            .map(|unit| {
                let group = groups.group(gather_group(&unit.shard.unit)).clone();
                let own = unit.copy.as_ref().or(unit.master.as_ref());
                let own = own.expect("a rank has its shard").clone();
                (group, own, unit.shard.unit.range.clone())
            })
            .collect();
        move |device| {
            for (group, own, range) in units {
                let part = full.view_mut().part(range);
                collectives::all_gather(device, &group, own.view(), part)?;
                group.release_peer_pages();
            }
            Ok(full)
        }
    }

    /// A block's parameters in the compute type.
    ///
    /// # Panics
    /// If the block is not gathered.
    pub fn block(&self, block: usize) -> View<'_> {
        self.get(block).expect("a block is gathered before it is used")
    }

    /// The parameters of a block, if they are gathered.
    pub fn get(&self, block: usize) -> Option<View<'_>> {
        self.blocks[block].full.as_ref().map(Tensor::view)
    }

    /// This rank's shard of a unit, to be updated by the optimizer: the f32 masters, and the copy that must follow them.
    pub fn own_mut(&mut self, block: usize, unit: usize) -> (ViewMut<'_>, Option<ViewMut<'_>>) {
        let Block { full, units, .. } = &mut self.blocks[block];
        let UnitState { shard, master, copy, .. } = &mut units[unit];
        let of_full = full.as_mut().map(|full| full.view_mut().part(shard.own.clone()));
        match (master, copy) {
            (None, _) => (of_full.expect("without masters the whole buffer is permanent"), None),
            (Some(master), Some(copy)) => (master.view_mut(), Some(copy.view_mut())),
            (Some(master), None) => {
                (master.view_mut(), of_full.filter(|_| self.dtype != Dtype::F32))
            }
        }
    }

    /// Whether masters are in host memory.
    pub fn offloads(&self) -> bool {
        self.offload
    }

    /// This rank's shard of a unit in host memory. [`Weights::upload`] copies the updated values to the device.
    ///
    /// # Panics
    /// If masters are not offloaded.
    pub fn host_mut(&mut self, block: usize, unit: usize) -> HostShard<'_> {
        assert!(self.offload, "the masters are on the device");
        let UnitState { master, outgoing, .. } = &mut self.blocks[block].units[unit];
        let master = master.as_mut().expect("offloaded masters exist").view_mut();
        HostShard { master, copy: outgoing.as_mut().map(Tensor::view_mut) }
    }

    /// Copies this rank's shards of a block from the host to the device, when the device has reached `after`. Operations
    /// that are issued later wait for it; the host must wait for such an operation before it changes the shard again.
    pub fn upload(&mut self, device: &Device, block: usize, after: &Event) {
        let Block { full, units, .. } = &self.blocks[block];
        for UnitState { shard, master, copy, outgoing } in units {
            let from = outgoing.as_ref().or(master.as_ref()).expect("offloaded masters exist");
            let (to, at) = match (copy, full) {
                (Some(copy), _) => (copy, 0),
                (None, full) => (full.as_ref().expect("whole and permanent"), shard.own.start),
            };
            let copied = device.transfer(from.clone(), 0..from.len(), to.clone(), at, after);
            drop(copied.before_later_operations(device));
        }
    }

    /// This rank's shard of a unit's masters.
    pub fn own(&self, block: usize, unit: usize) -> View<'_> {
        let Block { full, units, .. } = &self.blocks[block];
        let UnitState { shard, master, .. } = &units[unit];
        match master {
            Some(master) => master.view(),
            None => {
                let full = full.as_ref().expect("without masters the whole buffer is permanent");
                full.view().part(shard.own.clone())
            }
        }
    }

    /// The units of a block and this rank's shard of each.
    pub fn shards(&self, block: usize) -> impl Iterator<Item = &Shard> {
        self.blocks[block].units.iter().map(|unit| &unit.shard)
    }

    /// After the optimizer step, all-gathers the updated shards.
    ///
    /// ZeRO-1 and 2: (P-1)/P of all parameters per rank. Otherwise nothing.
    pub fn all_gather(&mut self, device: &Device, groups: &Groups) -> Result<()> {
        if self.gather != Gather::AfterOptimizer {
            return Ok(());
        }
        for (number, Block { full, units, .. }) in self.blocks.iter_mut().enumerate() {
            record(&self.log, StateOp::Gather { block: number });
            let full = full.as_mut().expect("whole parameters are permanent");
            for UnitState { shard, .. } in units {
                let group = groups.group(gather_group(&shard.unit));
                if group.size() == 1 {
                    continue;
                }
                let mut own = device.empty(1, shard.own.len(), full.dtype(), Tag::Buffers);
                device.copy(full.view().part(shard.own.clone()), own.view_mut());
                let whole = full.view_mut().part(shard.unit.range.clone());
                collectives::all_gather(device, group, own.view(), whole)?;
            }
        }
        Ok(())
    }

    /// The number of blocks on this rank.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The compute type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
}

impl UnitState {
    fn new(device: &Device, shard: &Shard, values: &Tensor, storage: Storage) -> UnitState {
        let Storage { dtype, gather, offload } = storage;
        let (permanent, is_f32) = (!gather.shards_parameters(), dtype == Dtype::F32);
        let own = values.view().part(shard.own.clone());
        let stored = |dtype: Dtype| {
            let mut stored = device.empty(1, own.len(), dtype, Tag::Parameters);
            match dtype {
                Dtype::F32 => device.copy(own, stored.view_mut()),
                _ => device.cast(own, stored.view_mut()),
            }
            stored
        };
        let host = |dtype| device.empty_offloaded(1, own.len(), dtype, Tag::Parameters);
        let master = match offload {
            true => {
                let mut master = host(Dtype::F32);
                device.read(own, master.view_mut().host::<f32>());
                Some(master)
            }
            false => (!permanent || !is_f32).then(|| stored(Dtype::F32)),
        };
        UnitState {
            shard: shard.clone(),
            master,
            copy: (!permanent && (offload || !is_f32)).then(|| stored(dtype)),
            outgoing: (offload && !is_f32).then(|| host(dtype)),
        }
    }
}
