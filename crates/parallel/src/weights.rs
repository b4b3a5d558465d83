//! The parameters on a rank: one flat buffer per block, in the type that is computed with, and what the
//! optimizer keeps of it. ZeRO decides how much of that is here.
//!
//! | stage | computed with | masters (f32) |
//! |---|---|---|
//! | 0 | whole | whole |
//! | 1, 2 | whole | this rank's run |
//! | 3 | gathered block by block, and freed | this rank's run |
//!
//! Where f32 is computed with, the master is the buffer itself, or this rank's run of it.

use std::ops::Range;

use lockstep_comm::Result;
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::GroupKind;
use lockstep_plan::model::{BlockParams, Init, Param, Part, Runs, Shard};

use crate::courier::{Courier, Task};
use crate::{Groups, floats};

/// All parameters of a rank, block by block.
pub struct Weights {
    /// What each block holds, and in which order.
    pub layout: Vec<BlockParams>,
    blocks: Vec<Block>,
    dtype: Dtype,
    /// ZeRO's.
    stage: u8,
    /// Whether what was gathered for the forward pass stays for the backward pass.
    keep: bool,
    courier: Option<Courier>,
}

struct Block {
    /// The whole buffer, when it is here.
    full: Option<Tensor>,
    /// It is on its way.
    coming: Option<Task<Result<Tensor>>>,
    pieces: Vec<Piece>,
}

/// What this rank keeps of a unit.
struct Piece {
    shard: Shard,
    /// f32; none where the whole buffer is the master.
    master: Option<Tensor>,
    /// In the type that is computed with, when that is not f32 and the whole buffer comes and goes.
    copy: Option<Tensor>,
}

impl Weights {
    /// Random ones. Each element is a function of (seed, its tensor, its place in the whole tensor), so that
    /// any layout starts alike.
    pub fn init(device: &Device, part: &Part, dtype: Dtype, stage: u8, seed: u64) -> Weights {
        Weights::new(device, part, dtype, stage, |block, _, mut buffer| {
            for (start, param) in block.placed() {
                let mut place = buffer.reborrow().part(start..start + param.len());
                match param.init {
                    Init::Zeros => device.fill(place, 0.0),
                    Init::Ones => device.fill(place, 1.0),
                    Init::Normal(std) => param.runs().for_each(|(first, run)| {
                        let to = place.reborrow().part(run);
                        device.normal(to, seed, param.whole.number, first as u64, std);
                    }),
                }
            }
        })
    }

    /// From elsewhere: `read` is called with a tensor, which elements of it are needed here, and room for them.
    pub fn load(
        device: &Device,
        part: &Part,
        dtype: Dtype,
        stage: u8,
        mut read: impl FnMut(&Param, &[Runs], &mut [f32]),
    ) -> Weights {
        let mut values = Vec::new();
        Weights::new(device, part, dtype, stage, |block, needed, mut buffer| {
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

    /// `fill` gives each block its f32 values, in the ranges that are needed here.
    fn new(
        device: &Device,
        part: &Part,
        dtype: Dtype,
        stage: u8,
        mut fill: impl FnMut(&BlockParams, &[Range<usize>], ViewMut<'_>),
    ) -> Weights {
        let blocks = part.blocks.iter().zip(&part.shards).map(|(layout, shards)| {
            let whole_stays = stage < 3;
            let tag =
                if whole_stays && dtype == Dtype::F32 { Tag::Parameters } else { Tag::Buffers };
            let mut values = device.empty(1, layout.len(), Dtype::F32, tag);
            let needed: Vec<Range<usize>> = match whole_stays {
                true => std::iter::once(0..layout.len()).collect(),
                false => shards.iter().map(|shard| shard.own.clone()).collect(),
            };
            fill(layout, &needed, values.view_mut());
            let pieces = shards.iter().map(|shard| Piece::of(device, shard, &values, dtype, stage));
            let pieces = pieces.collect();
            let full = whole_stays.then(|| {
                if dtype == Dtype::F32 {
                    return values;
                }
                let mut copy = device.empty(1, layout.len(), dtype, Tag::Parameters);
                device.cast(values.view(), copy.view_mut());
                copy
            });
            Block { full, coming: None, pieces }
        });
        let blocks = blocks.collect();
        Weights { layout: part.blocks.clone(), blocks, dtype, stage, keep: false, courier: None }
    }

    /// Lets parameters be gathered ahead, by a thread of their own: where the wire does the work.
    pub fn ahead(mut self, yes: bool) -> Weights {
        self.courier = (yes && self.stage == 3).then(|| Courier::new("gather"));
        self
    }

    /// Lets what was gathered for the forward pass stay for the backward pass.
    pub fn keep_gathered(mut self, yes: bool) -> Weights {
        self.keep = yes;
        self
    }

    /// Sees to it that a block's buffer is here, and that `next` comes while this one is worked on.
    ///
    /// ZeRO-3: an all-gather, (P-1)/P of the block per rank. Otherwise nothing.
    pub fn gather(&mut self, device: &Device, groups: &Groups, block: usize, next: Option<usize>) {
        if self.stage < 3 {
            return;
        }
        if self.blocks[block].full.is_none() {
            let coming = self.blocks[block].coming.take();
            let gathered = groups.exchanged(|| match coming {
                Some(task) => task.wait(),
                None => self.gather_block(device, groups, block)(),
            });
            match gathered {
                Ok(full) => self.blocks[block].full = Some(full),
                Err(error) => {
                    // The pass goes on with what is there; the step is refused at its end.
                    groups.note(Err(error));
                    let len = self.layout[block].len();
                    let empty = device.zeros(1, len, self.dtype, Tag::Buffers);
                    self.blocks[block].full = Some(empty);
                }
            }
        }
        if let (Some(next), Some(courier)) = (next, &self.courier) {
            let there = &self.blocks[next];
            if there.full.is_none() && there.coming.is_none() {
                let task = courier.start(self.gather_block(device, groups, next));
                self.blocks[next].coming = Some(task);
            }
        }
    }

    /// The block is not needed for now: in the forward pass, or until the next step.
    pub fn release(&mut self, block: usize, forward: bool) {
        if self.stage == 3 && !(forward && self.keep) {
            self.blocks[block].full = None;
        }
    }

    /// How to gather a block: its pieces from all that share them.
    fn gather_block(
        &self,
        device: &Device,
        groups: &Groups,
        block: usize,
    ) -> impl FnOnce() -> Result<Tensor> + Send + 'static + use<> {
        let mut full = device.empty(1, self.layout[block].len(), self.dtype, Tag::Buffers);
        let pieces: Vec<_> = self.blocks[block]
            .pieces
            .iter()
            .map(|piece| {
                let kind = if piece.shard.unit.expert {
                    GroupKind::ExpertGather
                } else {
                    GroupKind::Gather
                };
                let own = piece.copy.as_ref().or(piece.master.as_ref());
                let own = own.expect("at stage 3 a rank has its own run").clone();
                (groups.group(kind).clone(), own, piece.shard.unit.range.clone())
            })
            .collect();
        move || {
            for (group, own, range) in pieces {
                floats::all_gather(&group, own.view(), full.view_mut().part(range))?;
                group.release_peer_pages();
            }
            Ok(full)
        }
    }

    /// What a block computes with.
    ///
    /// # Panics
    /// When it was not asked for by `gather`.
    pub fn block(&self, block: usize) -> View<'_> {
        self.get(block).expect("a block is gathered before it is used")
    }

    /// The parameters of a block, if they are gathered.
    pub fn get(&self, block: usize) -> Option<View<'_>> {
        self.blocks[block].full.as_ref().map(Tensor::view)
    }

    /// What a step of the optimizer changes of a unit: this rank's run of the masters in f32, and of the
    /// copies that must follow them.
    pub fn own_mut(&mut self, block: usize, unit: usize) -> (ViewMut<'_>, Option<ViewMut<'_>>) {
        let Block { full, pieces, .. } = &mut self.blocks[block];
        let Piece { shard, master, copy } = &mut pieces[unit];
        let narrow = self.dtype != Dtype::F32;
        let of_full = full.as_mut().map(|full| full.view_mut().part(shard.own.clone()));
        match (master, copy) {
            (None, _) => (of_full.expect("without masters the whole buffer is here"), None),
            (Some(master), Some(copy)) => (master.view_mut(), Some(copy.view_mut())),
            (Some(master), None) => (master.view_mut(), of_full.filter(|_| narrow)),
        }
    }

    /// This rank's run of a unit's masters.
    pub fn own(&self, block: usize, unit: usize) -> View<'_> {
        let Block { full, pieces, .. } = &self.blocks[block];
        let Piece { shard, master, .. } = &pieces[unit];
        match master {
            Some(master) => master.view(),
            None => {
                let full = full.as_ref().expect("without masters the whole buffer is here");
                full.view().part(shard.own.clone())
            }
        }
    }

    /// Each block's units and the runs of them that this rank keeps.
    pub fn shards(&self, block: usize) -> impl Iterator<Item = &Shard> {
        self.blocks[block].pieces.iter().map(|piece| &piece.shard)
    }

    /// After the optimizer: every rank's new run reaches those that compute with it.
    ///
    /// ZeRO-1 and 2: an all-gather, (P-1)/P of all parameters per rank. Otherwise nothing.
    pub fn all_gather(&mut self, device: &Device, groups: &Groups) -> Result<()> {
        for Block { full, pieces, .. } in &mut self.blocks {
            let Some(full) = full.as_mut().filter(|_| self.stage > 0) else { continue };
            for Piece { shard, .. } in pieces {
                let kind =
                    if shard.unit.expert { GroupKind::ExpertGather } else { GroupKind::Gather };
                let group = groups.group(kind);
                if group.size() == 1 {
                    continue;
                }
                let mut own = device.empty(1, shard.own.len(), full.dtype(), Tag::Buffers);
                device.copy(full.view().part(shard.own.clone()), own.view_mut());
                let whole = full.view_mut().part(shard.unit.range.clone());
                floats::all_gather(group, own.view(), whole)?;
            }
        }
        Ok(())
    }

    /// Flat buffers on this rank.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Of what is computed with.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// ZeRO's.
    pub fn stage(&self) -> u8 {
        self.stage
    }
}

impl Piece {
    fn of(device: &Device, shard: &Shard, values: &Tensor, dtype: Dtype, stage: u8) -> Piece {
        let own = values.view().part(shard.own.clone());
        let kept = |dtype: Dtype| {
            let mut kept = device.empty(1, own.len(), dtype, Tag::Parameters);
            match dtype {
                Dtype::F32 => device.copy(own, kept.view_mut()),
                _ => device.cast(own, kept.view_mut()),
            }
            kept
        };
        let wide = dtype == Dtype::F32;
        Piece {
            shard: shard.clone(),
            master: (stage == 3 || !wide).then(|| kept(Dtype::F32)),
            copy: (stage == 3 && !wide).then(|| kept(dtype)),
        }
    }
}
