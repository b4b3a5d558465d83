//! The expert axis: rows go to the ranks that hold their experts, and what these make of them comes back. Knows
//! rows, counts and the group; not what a row is, nor what an expert does with it.
//!
//! ```text
//! here          all experts' rows, expert by expert        e0 e0 e1 │ e2 e3 e3
//!                                                          rank 0   │ rank 1
//! to_experts    rows of the experts here, expert by expert; those of one expert by the rank that they
//!               come from, and of one rank in its order
//! from_experts  the way back, with as many columns or others
//! ```
//!
//! The order follows from the counts alone, so that the same rows give the same sums, bit for bit.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::{GroupKind, cut};

use crate::{Groups, floats};

/// Which rows go where.
pub struct Dispatch {
    /// Of the experts here, once all have come.
    pub rows: usize,
    /// Where those of each expert here begin, (1, experts here + 1), u32.
    pub starts: Tensor,
    /// None where all experts are here.
    moves: Option<Moves>,
}

/// In rows.
struct Moves {
    /// To each member.
    sent: Vec<usize>,
    /// From each member.
    received: Vec<usize>,
    /// (members, experts here)
    counts: Vec<usize>,
}

impl Groups {
    /// Agrees on what goes where. The caller has `starts` (1, experts + 1), u32: where its rows of each of all
    /// experts begin, and of all of them `rows`.
    ///
    /// One all-to-all of a number per expert; nothing where all experts are here.
    pub fn dispatch(&self, device: &Device, starts: &Tensor, rows: usize) -> Dispatch {
        let group = self.group(GroupKind::Expert);
        if group.size() == 1 {
            return Dispatch { rows, starts: starts.clone(), moves: None };
        }
        let (members, experts) = (group.size(), starts.len() - 1);
        let held: Vec<usize> = (0..members).map(|rank| cut(experts, members, rank).len()).collect();
        let here = held[group.rank()];

        let mut bounds = vec![0u32; experts + 1];
        device.read(starts.view(), &mut bounds);
        let asked: Vec<i32> = bounds.windows(2).map(|two| (two[1] - two[0]) as i32).collect();
        let mut told = vec![0i32; members * here];
        let counts = vec![here; members];
        self.note(self.exchanged(|| group.all_to_all_v(&asked, &held, &mut told, &counts)));

        let sum = |counts: &[i32]| counts.iter().map(|&count| count as usize).sum::<usize>();
        let of_member = |rank| sum(&asked[cut(experts, members, rank)]);
        let moves = Moves {
            sent: (0..members).map(of_member).collect(),
            received: (0..members).map(|rank| sum(&told[rank * here..][..here])).collect(),
            counts: told.iter().map(|&count| count as usize).collect(),
        };
        let of_expert = |expert| (0..members).map(|rank| moves.counts[rank * here + expert]).sum();
        let ends = (0..here).scan(0, |end, expert| {
            *end += Some::<usize>(of_expert(expert))?;
            Some(*end as u32)
        });
        let bounds: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let mut starts = device.empty(1, here + 1, Dtype::U32, Tag::Activations);
        device.write(starts.view_mut(), &bounds);
        Dispatch { rows: moves.received.iter().sum(), starts, moves: Some(moves) }
    }

    /// Rows of all experts from here become rows from everywhere of the experts here.
    ///
    /// One all-to-all: (P-1)/P of the rows per rank where experts are evenly used. Nothing where all are here.
    pub fn to_experts(&self, device: &Device, dispatch: &Dispatch, rows: Tensor) -> Tensor {
        let Some(moves) = &dispatch.moves else { return rows };
        let arrived = self.exchange(device, rows, &moves.sent, &moves.received);
        if moves.grouped() {
            return arrived;
        }
        let (cols, dtype) = (arrived.cols(), arrived.dtype());
        let mut grouped = device.empty(arrived.rows(), cols, dtype, Tag::Buffers);
        for (by_rank, by_expert) in moves.runs() {
            let to = grouped.view_mut().rows_of(by_expert);
            device.copy(arrived.view().rows_of(by_rank), to);
        }
        grouped
    }

    /// The other way: what experts made of each row comes back to where the row was.
    ///
    /// As `to_experts`.
    pub fn from_experts(&self, device: &Device, dispatch: &Dispatch, rows: Tensor) -> Tensor {
        let Some(moves) = &dispatch.moves else { return rows };
        if moves.grouped() {
            return self.exchange(device, rows, &moves.received, &moves.sent);
        }
        let mut leaving = device.empty(rows.rows(), rows.cols(), rows.dtype(), Tag::Buffers);
        for (by_rank, by_expert) in moves.runs() {
            let to = leaving.view_mut().rows_of(by_rank);
            device.copy(rows.view().rows_of(by_expert), to);
        }
        drop(rows);
        self.exchange(device, leaving, &moves.received, &moves.sent)
    }

    /// Sums numbers that the ranks of a group have parts of, in place: what routers counted.
    pub fn sum_over(&self, kind: GroupKind, x: &mut Tensor) {
        let group = self.group(kind);
        if group.size() > 1 {
            self.note(self.exchanged(|| floats::all_reduce(group, x.view_mut())));
        }
    }

    fn exchange(
        &self,
        device: &Device,
        rows: Tensor,
        sent: &[usize],
        received: &[usize],
    ) -> Tensor {
        let group = self.group(GroupKind::Expert);
        let mut come = device.empty(received.iter().sum(), rows.cols(), rows.dtype(), Tag::Buffers);
        self.note(self.exchanged(|| {
            floats::all_to_all_v(group, rows.view(), sent, come.view_mut(), received)
        }));
        come
    }
}

impl Dispatch {
    /// Whether rows have to travel, so that what came once is better kept.
    pub fn travels(&self) -> bool {
        self.moves.is_some()
    }
}

impl Moves {
    fn experts(&self) -> usize {
        self.counts.len() / self.received.len()
    }

    /// Whether rows by rank are rows by expert.
    fn grouped(&self) -> bool {
        self.experts() <= 1
    }

    /// Rows that lie side by side in both orders: where by rank, then expert; and where by expert, then rank.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (members, experts) = (self.received.len(), self.experts());
        let order = (0..experts)
            .flat_map(move |expert| (0..members).map(move |rank| rank * experts + expert));
        order.scan(0, move |end, place| {
            let (start, len) = (*end, self.counts[place]);
            *end += len;
            let by_rank: usize = self.counts[..place].iter().sum();
            Some((by_rank..by_rank + len, start..*end))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_comm::{Algo, on_threads};
    use lockstep_plan::Mesh;

    /// Rows of expert `e` that rank `rank` has: some have none, and one rank has none at all.
    fn count(rank: usize, e: usize) -> usize {
        if rank == 2 { 0 } else { (rank * 5 + e * 3 + rank * e) % 4 }
    }

    /// What tells a row: from which rank, of which expert, the how manieth.
    fn row(rank: usize, e: usize, i: usize) -> [f32; 3] {
        [rank as f32, e as f32, i as f32]
    }

    #[test]
    fn rows_arrive_by_expert_and_rank_and_come_back_as_they_were() {
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
                    let mut wide = device.empty(values.len() / 3, 3, Dtype::F32, Tag::Buffers);
                    device.write(wide.view_mut(), values);
                    let mut rows = device.empty(values.len() / 3, 3, dtype, Tag::Buffers);
                    match dtype {
                        Dtype::F32 => device.copy(wide.view(), rows.view_mut()),
                        _ => device.cast(wide.view(), rows.view_mut()),
                    }
                    rows
                };
                let host = |rows: &Tensor| {
                    let mut wide = device.empty(rows.rows(), 3, Dtype::F32, Tag::Buffers);
                    match dtype {
                        Dtype::F32 => device.copy(rows.view(), wide.view_mut()),
                        _ => device.cast(rows.view(), wide.view_mut()),
                    }
                    wide.view().host::<f32>().to_vec()
                };

                let dispatch = groups.dispatch(&device, &starts, bounds[experts] as usize);
                let there = groups.to_experts(&device, &dispatch, tensor(&mine));
                let (mut right, mut right_starts) = (vec![], vec![0]);
                for e in cut(experts, ranks, me) {
                    for rank in 0..ranks {
                        right.extend((0..count(rank, e)).flat_map(|i| row(rank, e, i)));
                    }
                    right_starts.push(right.len() as u32 / 3);
                }
                assert_eq!(host(&there), right, "{ranks} ranks, {experts} experts, {dtype}");
                assert_eq!(dispatch.starts.view().host::<u32>(), right_starts);
                assert_eq!(dispatch.rows, right.len() / 3);

                let back = groups.from_experts(&device, &dispatch, there);
                assert_eq!(host(&back), mine, "{ranks} ranks, {experts} experts, {dtype}");
                groups.check().unwrap();
            });
        }
    }

    /// What is sent is what the price says: the rows that go elsewhere.
    #[test]
    fn rows_that_stay_are_not_sent() {
        on_threads(2, |world| {
            let mesh = Mesh { data: 2, expert: 2, ..Mesh::ONE };
            let groups = Groups::new(&world, &mesh, false).unwrap();
            let device = Device::cpu(1);
            let mut starts = device.empty(1, 3, Dtype::U32, Tag::Buffers);
            // Three rows stay and five go.
            let (stay, go, cols) = (3, 5, 16);
            let first = if world.rank() == 0 { stay } else { go };
            device.write(starts.view_mut(), &[0, first as u32, (stay + go) as u32]);
            let dispatch = groups.dispatch(&device, &starts, stay + go);
            let Moves { sent, received, .. } = dispatch.moves.unwrap();

            // As between hosts, where a row is a message.
            let group = groups.group(GroupKind::Expert).with_algo(Some(Algo::Flat));
            let before = group.traffic().bytes;
            let rows = device.zeros(stay + go, cols, Dtype::F32, Tag::Buffers);
            let mut come = device.zeros(dispatch.rows, cols, Dtype::F32, Tag::Buffers);
            let all = floats::all_to_all_v(&group, rows.view(), &sent, come.view_mut(), &received);
            all.unwrap();
            assert_eq!(group.traffic().bytes - before, (go * cols * 4) as u64);
            groups.check().unwrap();
        });
    }
    /// A pass goes on with whatever is there, and the end of it tells what happened.
    #[test]
    fn a_peer_that_is_gone_is_told_at_the_end() {
        let told = on_threads(2, |world| {
            let mesh = Mesh { data: 2, expert: 2, ..Mesh::ONE };
            let groups = Groups::new(&world, &mesh, false).unwrap();
            if world.rank() == 1 {
                return None;
            }
            let device = Device::cpu(1);
            let mut starts = device.empty(1, 3, Dtype::U32, Tag::Buffers);
            device.write(starts.view_mut(), &[0u32, 2, 5]);
            let dispatch = groups.dispatch(&device, &starts, 5);
            let rows = device.zeros(5, 4, Dtype::F32, Tag::Buffers);
            let there = groups.to_experts(&device, &dispatch, rows);
            let back = groups.from_experts(&device, &dispatch, there);
            assert_eq!((back.rows(), back.cols()), (5, 4));
            Some(groups.check().unwrap_err().to_string())
        });
        assert!(told[0].as_ref().unwrap().contains("rank 1"), "{told:?}");
    }
}
