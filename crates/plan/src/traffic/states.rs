//! What is exchanged of parameters and their gradients.

use std::ops::Range;

use super::{Collective, List};
use crate::config::Compression;
use crate::mesh::GroupKind;
use crate::model::{Param, Part, Shard, Split, Unit};
use crate::passes::Moment;
use crate::plan::Plan;

pub(super) struct States<'a> {
    plan: &'a Plan,
    part: &'a Part,
    /// How gradients travel.
    how: Compression,
    /// Of ZeRO-3's blocks, which are gathered.
    here: Vec<bool>,
}

impl<'a> States<'a> {
    pub fn new(plan: &'a Plan, part: &'a Part, how: Compression) -> States<'a> {
        States { plan, part, how, here: vec![false; part.blocks.len()] }
    }

    /// ZeRO-3: the blocks that a moment needs are gathered, unless they still are.
    pub fn gather(&mut self, list: &mut List, moment: Moment) {
        if self.plan.layout.zero < 3 {
            return;
        }
        match moment {
            Moment::Embed { block } | Moment::Forward { block } => {
                self.need(list, block);
                self.here[block] = self.plan.layout.keep_gathered;
            }
            Moment::Turn { block, table } => {
                for block in [Some(block), table].into_iter().flatten() {
                    self.need(list, block);
                    self.here[block] = false;
                }
            }
            Moment::Backward { block, .. } => {
                self.need(list, block);
                self.here[block] = false;
            }
            Moment::EmbedBackward { block } => self.here[block] = false,
            _ => {}
        }
    }

    fn need(&mut self, list: &mut List, block: usize) {
        if !self.here[block] {
            self.part.shards[block].iter().for_each(|shard| self.together(list, &shard.unit));
        }
    }

    /// After the optimizer: what ranks stepped reaches those that compute with it. ZeRO-3 gathers when needed.
    pub fn spread(&self, list: &mut List) {
        if matches!(self.plan.layout.zero, 1 | 2) {
            let shards = self.part.shards.iter().flatten();
            shards.for_each(|shard| self.together(list, &shard.unit));
        }
    }

    fn together(&self, list: &mut List, unit: &Unit) {
        let kind = if unit.expert { GroupKind::ExpertGather } else { GroupKind::Gather };
        let width = self.plan.precision.compute.bytes();
        list.add(kind, Collective::AllGather, unit.range.len(), width);
    }

    /// Sums of gradients over the replicas.
    pub fn sums(&self, list: &mut List) {
        if self.part.mesh.replicas() == 1 {
            return;
        }
        if self.plan.layout.zero == 0 {
            for (run, expert) in self.buckets() {
                self.sum(list, Collective::AllReduce, copies(expert), run.len());
            }
            return;
        }
        // Where weight gradients are put off, buffers hold several micro-batches and are summed at the end.
        let mixed = self.plan.layout.pipe > 1 && self.plan.layout.schedule.splits();
        let each = self.plan.layout.zero >= 2 && !mixed;
        let times = if each { self.plan.train.accumulation } else { 1 };
        for Shard { unit, own } in self.part.shards.iter().flatten() {
            for _ in 0..times {
                self.sum(list, Collective::ReduceScatter, shard(unit.expert), unit.range.len());
            }
            list.add(copies(unit.expert), Collective::AllReduce, own.len(), self.width());
        }
    }

    /// The runs that are summed at once: neighbours in a bucket whose ranks are the same.
    fn buckets(&self) -> Vec<(Range<usize>, bool)> {
        let least = self.plan.comm.bucket_bytes / self.width();
        let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
        // Where the bucket begins, and where the block does, of all gradients.
        let (mut bucket, mut start) = (0, 0);
        for (block, shards) in self.part.blocks.iter().zip(&self.part.shards).rev() {
            if start - bucket >= least {
                bucket = start;
            }
            for Shard { unit, .. } in shards {
                let range = start + unit.range.start..start + unit.range.end;
                match runs.last_mut() {
                    Some((run, expert))
                        if *expert == unit.expert
                            && run.end == range.start
                            && run.end != bucket =>
                    {
                        run.end = range.end
                    }
                    _ => runs.push((range, unit.expert)),
                }
            }
            start += block.len();
        }
        runs
    }

    /// A sum in the form in which gradients travel.
    fn sum(&self, list: &mut List, collective: Collective, kind: GroupKind, len: usize) {
        let ranks = list.size(kind);
        let whole = collective == Collective::AllReduce;
        match self.how {
            Compression::None => list.add(kind, collective, len, self.width()),
            Compression::TopK(fraction) => {
                // Places and numbers, four bytes each.
                let chosen = ((fraction * len as f64).ceil() as usize).clamp(len.min(1), len);
                if whole {
                    list.add(kind, Collective::AllGather, ranks * 8 * chosen, 1);
                } else {
                    list.add(kind, Collective::AllToAll, ranks, 8);
                    list.add(kind, Collective::AllToAllV, 8 * chosen, 1);
                }
            }
            rounded => {
                let all = ranks * packed(rounded, len.div_ceil(ranks));
                list.add(kind, Collective::AllToAll, all, 1);
                if whole {
                    list.add(kind, Collective::AllGather, all, 1);
                }
            }
        }
    }

    /// Sums of what ranks of the other axes have parts of, and what one of them tells the others.
    pub fn parts(&self, list: &mut List) {
        if self.how.depends_on_neighbours() {
            let same = self.count(|param| param.same_on_tensor(self.plan.layout.sequence));
            list.add(GroupKind::Tensor, Collective::AllReduce, same, self.width());
        }
        if self.plan.layout.sequence {
            let norms = self.count(|param| param.split == Split::Norm);
            list.add(GroupKind::Tensor, Collective::AllReduce, norms, self.width());
        }
        if self.part.mesh.keys > 1 {
            let keys = self.count(|param| param.split == Split::Keys);
            list.add(GroupKind::Keys, Collective::AllReduce, keys, self.width());
        }
        let tied = self.count(|param| param.tied);
        list.add(GroupKind::Ends, Collective::AllReduce, tied, self.width());
    }

    /// Bytes of an element of a gradient.
    fn width(&self) -> usize {
        self.plan.precision.gradients.bytes()
    }

    /// Elements of some parameters in this rank's runs.
    fn count(&self, which: impl Fn(&Param) -> bool) -> usize {
        let of_block = |(params, shards): (&crate::model::BlockParams, &Vec<Shard>)| -> usize {
            let placed = params.placed().filter(|(_, param)| which(param));
            placed
                .flat_map(|(start, param)| {
                    shards.iter().map(move |shard| (start, param.len(), shard))
                })
                .map(|(start, len, Shard { own, .. })| {
                    (start + len).min(own.end).saturating_sub(start.max(own.start))
                })
                .sum()
        };
        self.part.blocks.iter().zip(&self.part.shards).map(of_block).sum()
    }
}

/// Bytes of rounded numbers; all but bf16 with a scale for every 256.
fn packed(how: Compression, numbers: usize) -> usize {
    match how {
        Compression::Bf16 => 2 * numbers,
        Compression::F16 => 2 * numbers + 4 * numbers.div_ceil(256),
        _ => numbers + 4 * numbers.div_ceil(256),
    }
}

fn shard(expert: bool) -> GroupKind {
    if expert { GroupKind::ExpertShard } else { GroupKind::Shard }
}

fn copies(expert: bool) -> GroupKind {
    if expert { GroupKind::ExpertCopies } else { GroupKind::Copies }
}
