//! The expert axis: sends rows to the ranks that hold their experts, and the experts' outputs back. Knows rows, counts
//! and the group, not what a row is or what an expert computes.
//!
//! ```text
//! local rows    all experts' rows, expert by expert        e0 e0 e1 │ e2 e3 e3
//!                                                          rank 0   │ rank 1
//! to_experts    rows of the local experts, expert by expert; within an expert in the order of the source
//!               ranks, and within a rank in its order
//! from_experts  the inverse, with the same or another number of columns
//! ```
//!
//! The order follows from the counts alone, so the same rows give the same sums, bit for bit.

use std::ops::Range;

use lockstep_comm::trace::CommAxis;
use lockstep_kernels::{Device, Dtype, RowGroups, Tag, Tensor};
use lockstep_plan::{GroupKind, cut};

use crate::Groups;
use crate::collectives::{self, RowCounts};

/// Routing of rows between ranks.
pub struct Dispatch {
    /// Rows of the local experts, from all ranks.
    pub rows: usize,
    /// The rows of each local expert.
    pub groups: RowGroups,
    /// None if all experts are local.
    exchange: Option<RowExchange>,
}

/// Numbers of rows that ranks exchange.
struct RowExchange {
    /// To each rank.
    sent: Vec<usize>,
    /// From each rank.
    received: Vec<usize>,
    /// (ranks, local experts)
    counts: Vec<usize>,
}

impl Groups {
    /// Exchanges the numbers of rows. `groups` has the caller's `rows` of each of all experts.
    ///
    /// One all-to-all with a number per expert; nothing if all experts are local.
    pub fn dispatch(&self, device: &Device, groups: &RowGroups, rows: usize) -> Dispatch {
        let group = self.group(GroupKind::Expert);
        if group.size() == 1 {
            return Dispatch { rows, groups: groups.clone(), exchange: None };
        }
        let (ranks, experts) = (group.size(), groups.count());
        let experts_of: Vec<usize> =
            (0..ranks).map(|rank| cut(experts, ranks, rank).len()).collect();
        let local = experts_of[group.rank()];

        let bounds = groups.on_host(device).windows(2);
        let outgoing: Vec<i32> = bounds.map(|two| (two[1] - two[0]) as i32).collect();
        let mut incoming = vec![0i32; ranks * local];
        let per_rank = vec![local; ranks];
        self.collective(CommAxis::Expert, || {
            group.all_to_all_v(&outgoing, &experts_of, &mut incoming, &per_rank)
        });

        let sum = |counts: &[i32]| counts.iter().map(|&count| count as usize).sum::<usize>();
        let exchange = RowExchange {
            sent: (0..ranks).map(|rank| sum(&outgoing[cut(experts, ranks, rank)])).collect(),
            received: (0..ranks).map(|rank| sum(&incoming[rank * local..][..local])).collect(),
            counts: incoming.iter().map(|&count| count as usize).collect(),
        };
        let rows_of = |expert| (0..ranks).map(|rank| exchange.counts[rank * local + expert]).sum();
        let ends = (0..local).scan(0, |end, expert| {
            *end += Some::<usize>(rows_of(expert))?;
            Some(*end as u32)
        });
        let bounds: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let mut starts = device.empty(1, local + 1, Dtype::U32, Tag::Activations);
        device.write(starts.view_mut(), &bounds);
        let (rows, groups) = (exchange.received.iter().sum(), RowGroups::new(starts));
        Dispatch { rows, groups, exchange: Some(exchange) }
    }

    /// Sends the rows of all experts to the ranks of these experts; returns the rows of the local experts.
    ///
    /// One all-to-all: (P-1)/P of the rows per rank if experts are evenly used. Nothing if all are local.
    pub fn to_experts(&self, device: &Device, dispatch: &Dispatch, rows: Tensor) -> Tensor {
        let Some(exchange) = &dispatch.exchange else { return rows };
        let arrived = self.exchange(device, rows, &exchange.sent, &exchange.received);
        if exchange.is_grouped() {
            return arrived;
        }
        let (cols, dtype) = (arrived.cols(), arrived.dtype());
        let mut grouped = device.empty(arrived.rows(), cols, dtype, Tag::Buffers);
        for (by_rank, by_expert) in exchange.runs() {
            let to = grouped.view_mut().rows_of(by_expert);
            device.copy(arrived.view().rows_of(by_rank), to);
        }
        grouped
    }

    /// Sends the experts' outputs back to the ranks and the order that the rows came from.
    ///
    /// The same cost as `to_experts`.
    pub fn from_experts(&self, device: &Device, dispatch: &Dispatch, rows: Tensor) -> Tensor {
        let Some(exchange) = &dispatch.exchange else { return rows };
        if exchange.is_grouped() {
            return self.exchange(device, rows, &exchange.received, &exchange.sent);
        }
        let mut by_source = device.empty(rows.rows(), rows.cols(), rows.dtype(), Tag::Buffers);
        for (by_rank, by_expert) in exchange.runs() {
            let to = by_source.view_mut().rows_of(by_rank);
            device.copy(rows.view().rows_of(by_expert), to);
        }
        drop(rows);
        self.exchange(device, by_source, &exchange.received, &exchange.sent)
    }

    fn exchange(
        &self,
        device: &Device,
        rows: Tensor,
        sent: &[usize],
        received: &[usize],
    ) -> Tensor {
        let group = self.group(GroupKind::Expert);
        let total = received.iter().sum();
        let mut arrived = device.empty(total, rows.cols(), rows.dtype(), Tag::Buffers);
        self.collective(CommAxis::Expert, || {
            let counts = RowCounts { sent, received };
            collectives::all_to_all_v(device, group, counts, rows.view(), arrived.view_mut())
        });
        arrived
    }
}

impl Dispatch {
    /// Whether rows cross ranks, so that recomputing them would repeat the communication.
    pub fn crosses_ranks(&self) -> bool {
        self.exchange.is_some()
    }
}

impl RowExchange {
    fn experts(&self) -> usize {
        self.counts.len() / self.received.len()
    }

    /// Whether the order by rank is the order by expert.
    fn is_grouped(&self) -> bool {
        self.experts() <= 1
    }

    /// Runs of rows that are contiguous in both orders: the range by rank, then expert, and the range by expert, then
    /// rank.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (ranks, experts) = (self.received.len(), self.experts());
        let order = (0..experts)
            .flat_map(move |expert| (0..ranks).map(move |rank| rank * experts + expert));
        order.scan(0, move |end, index| {
            let (start, len) = (*end, self.counts[index]);
            *end += len;
            let by_rank: usize = self.counts[..index].iter().sum();
            Some((by_rank..by_rank + len, start..*end))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::{Algo, on_threads};
    use lockstep_plan::Mesh;

    /// Number of rows of expert `e` on rank `rank`; some are zero, and rank 2 has no rows.
    fn count(rank: usize, e: usize) -> usize {
        if rank == 2 { 0 } else { (rank * 5 + e * 3 + rank * e) % 4 }
    }

    /// A row that identifies its rank, its expert and its index.
    fn row(rank: usize, e: usize, i: usize) -> [f32; 3] {
        [rank as f32, e as f32, i as f32]
    }

    #[test]
    fn rows_arrive_in_expert_order_and_return_in_the_original_order() {
        for (ranks, experts, dtype) in [
            (1, 4, Dtype::F32),
            (2, 4, Dtype::F32),
            (2, 2, Dtype::Bf16),
            (3, 7, Dtype::F32),
            (4, 8, Dtype::Bf16),
            (5, 5, Dtype::F32),
        ] {
            on_threads(ranks, |world| {
                let mesh = Mesh { data: ranks, expert: ranks, ..Mesh::ONE };
                let (device, me) = (Device::cpu(1), world.rank());
                let groups = Groups::new(&world, &mesh, false).unwrap();
                let mut bounds = vec![0u32];
                let mut mine: Vec<f32> = vec![];
                for e in 0..experts {
                    mine.extend((0..count(me, e)).flat_map(|i| row(me, e, i)));
                    bounds.push(mine.len() as u32 / 3);
                }
                let mut starts = device.empty(1, experts + 1, Dtype::U32, Tag::Buffers);
                device.write(starts.view_mut(), &bounds);
                let tensor = |values: &[f32]| {
                    let mut f32s = device.empty(values.len() / 3, 3, Dtype::F32, Tag::Buffers);
                    device.write(f32s.view_mut(), values);
                    let mut rows = device.empty(values.len() / 3, 3, dtype, Tag::Buffers);
                    match dtype {
                        Dtype::F32 => device.copy(f32s.view(), rows.view_mut()),
                        _ => device.cast(f32s.view(), rows.view_mut()),
                    }
                    rows
                };
                let host = |rows: &Tensor| {
                    let mut f32s = device.empty(rows.rows(), 3, Dtype::F32, Tag::Buffers);
                    match dtype {
                        Dtype::F32 => device.copy(rows.view(), f32s.view_mut()),
                        _ => device.cast(rows.view(), f32s.view_mut()),
                    }
                    let mut values = vec![0.0f32; rows.len()];
                    device.read(f32s.view(), &mut values);
                    values
                };

                let starts = RowGroups::new(starts);
                let dispatch = groups.dispatch(&device, &starts, bounds[experts] as usize);
                let there = groups.to_experts(&device, &dispatch, tensor(&mine));
                let (mut expected, mut expected_starts) = (vec![], vec![0]);
                for e in cut(experts, ranks, me) {
                    for rank in 0..ranks {
                        expected.extend((0..count(rank, e)).flat_map(|i| row(rank, e, i)));
                    }
                    expected_starts.push(expected.len() as u32 / 3);
                }
                assert_eq!(host(&there), expected, "{ranks} ranks, {experts} experts, {dtype}");
                assert_eq!(dispatch.groups.on_host(&device), expected_starts);
                assert_eq!(dispatch.rows, expected.len() / 3);

                let back = groups.from_experts(&device, &dispatch, there);
                assert_eq!(host(&back), mine, "{ranks} ranks, {experts} experts, {dtype}");
                groups.check().unwrap();
            });
        }
    }

    #[test]
    fn only_rows_for_other_ranks_are_sent() {
        on_threads(2, |world| {
            let mesh = Mesh { data: 2, expert: 2, ..Mesh::ONE };
            let groups = Groups::new(&world, &mesh, false).unwrap();
            let device = Device::cpu(1);
            let mut starts = device.empty(1, 3, Dtype::U32, Tag::Buffers);
            // Three rows stay and five go.
            let (stay, go, cols) = (3, 5, 16);
            let first = if world.rank() == 0 { stay } else { go };
            device.write(starts.view_mut(), &[0, first as u32, (stay + go) as u32]);
            let dispatch = groups.dispatch(&device, &RowGroups::new(starts), stay + go);
            let RowExchange { sent, received, .. } = dispatch.exchange.unwrap();

            // The algorithm between hosts sends messages, which are counted.
            let group = groups.group(GroupKind::Expert).with_algo(Some(Algo::Flat));
            let before = group.traffic().bytes;
            let rows = device.zeros(stay + go, cols, Dtype::F32, Tag::Buffers);
            let mut arrived = device.zeros(dispatch.rows, cols, Dtype::F32, Tag::Buffers);
            let to = arrived.view_mut();
            let counts = RowCounts { sent: &sent, received: &received };
            collectives::all_to_all_v(&device, &group, counts, rows.view(), to).unwrap();
            assert_eq!(group.traffic().bytes - before, (go * cols * 4) as u64);
            groups.check().unwrap();
        });
    }

    #[test]
    fn check_reports_a_lost_rank_after_the_pass() {
        let errors = on_threads(2, |world| {
            let mesh = Mesh { data: 2, expert: 2, ..Mesh::ONE };
            let groups = Groups::new(&world, &mesh, false).unwrap();
            if world.rank() == 1 {
                return None;
            }
            let device = Device::cpu(1);
            let mut starts = device.empty(1, 3, Dtype::U32, Tag::Buffers);
            device.write(starts.view_mut(), &[0u32, 2, 5]);
            let dispatch = groups.dispatch(&device, &RowGroups::new(starts), 5);
            let rows = device.zeros(5, 4, Dtype::F32, Tag::Buffers);
            let there = groups.to_experts(&device, &dispatch, rows);
            let back = groups.from_experts(&device, &dispatch, there);
            assert_eq!((back.rows(), back.cols()), (5, 4));
            Some(groups.check().unwrap_err().to_string())
        });
        assert!(errors[0].as_ref().unwrap().contains("rank 1"), "{errors:?}");
    }
}
