//! The device mesh: its axes, the coordinates of a rank, and the process groups that follow from them.

use serde::{Deserialize, Serialize};

/// An axis of the mesh.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Pipeline stages.
    Pipe,
    /// Replicas, each with its own samples.
    Data,
    /// Shards of each sequence.
    Context,
    /// Shards of each matrix.
    Tensor,
}

impl Axis {
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pipe => "pipe",
            Axis::Data => "data",
            Axis::Context => "context",
            Axis::Tensor => "tensor",
        }
    }
}

/// Number of ranks along each axis.
///
/// ```
/// use lockstep_plan::{GroupKind, Mesh};
///
/// let mesh = Mesh { pipe: 2, tensor: 2, ..Mesh::ONE };
/// assert_eq!(mesh.ranks(), 4);
/// assert_eq!(mesh.members(GroupKind::Tensor, 2), [2, 3]);
/// assert_eq!(mesh.members(GroupKind::Pipe, 2), [0, 2]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Mesh {
    pub pipe: usize,
    pub data: usize,
    pub context: usize,
    pub tensor: usize,
    /// Ranks that experts are distributed over: a divisor of `data × context`.
    pub expert: usize,
    /// Ranks that ZeRO shards states across: a divisor of `data × context`. Shards are replicated on the rest.
    pub shard: usize,
    /// Ulysses degree: context ranks that exchange heads by all-to-all. `context / ulysses` such groups form a ring.
    pub ulysses: usize,
    /// Tensor ranks that hold the same KV head, if there are fewer KV heads than tensor ranks.
    pub keys: usize,
    /// Axes from outermost to innermost. Ranks of the innermost axis are adjacent.
    pub order: [Axis; 4],
}

/// Coordinates of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Coord {
    pub pipe: usize,
    pub data: usize,
    pub context: usize,
    pub tensor: usize,
}

/// A kind of process group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Shards of the same matrices.
    Tensor,
    /// Tensor ranks that hold the same KV heads.
    Keys,
    /// Shards of the same sequences.
    Context,
    /// Stages of one pipeline.
    Pipe,
    /// First and last stage of a pipeline, which share a tied embedding.
    Ends,
    /// Ranks with the same dense parameters: data × context.
    Replicas,
    /// Replicas that shard states among themselves.
    Shard,
    /// Same ranks as `Shard`. A second group, so that parameters can be gathered while gradients are reduced.
    Gather,
    /// Replicas that hold the same shard.
    Copies,
    /// Ranks that exchange tokens with each other's experts.
    Expert,
    /// Like `Shard`, among ranks with the same experts.
    ExpertShard,
    /// Like `Gather`, among ranks with the same experts.
    ExpertGather,
    /// Like `Copies`, among ranks with the same experts.
    ExpertCopies,
}

impl GroupKind {
    pub const ALL: [GroupKind; 13] = [
        GroupKind::Tensor,
        GroupKind::Keys,
        GroupKind::Context,
        GroupKind::Pipe,
        GroupKind::Ends,
        GroupKind::Replicas,
        GroupKind::Shard,
        GroupKind::Gather,
        GroupKind::Copies,
        GroupKind::Expert,
        GroupKind::ExpertShard,
        GroupKind::ExpertGather,
        GroupKind::ExpertCopies,
    ];

    pub fn name(self) -> &'static str {
        match self {
            GroupKind::Tensor => "tensor",
            GroupKind::Keys => "keys",
            GroupKind::Context => "context",
            GroupKind::Pipe => "pipe",
            GroupKind::Ends => "ends",
            GroupKind::Replicas => "replicas",
            GroupKind::Shard => "shard",
            GroupKind::Gather => "gather",
            GroupKind::Copies => "copies",
            GroupKind::Expert => "expert",
            GroupKind::ExpertShard => "expert shard",
            GroupKind::ExpertGather => "expert gather",
            GroupKind::ExpertCopies => "expert copies",
        }
    }
}

impl Mesh {
    /// The mesh of a single device.
    pub const ONE: Mesh = Mesh {
        pipe: 1,
        data: 1,
        context: 1,
        tensor: 1,
        expert: 1,
        shard: 1,
        ulysses: 1,
        keys: 1,
        // The axis with the most traffic gets the closest links.
        order: [Axis::Pipe, Axis::Data, Axis::Context, Axis::Tensor],
    };

    pub fn ranks(&self) -> usize {
        self.pipe * self.replicas() * self.tensor
    }

    /// Number of ranks with the same dense parameters.
    pub fn replicas(&self) -> usize {
        self.data * self.context
    }

    pub fn size(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipe => self.pipe,
            Axis::Data => self.data,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
        }
    }

    pub fn coord(&self, rank: usize) -> Coord {
        assert!(rank < self.ranks(), "rank {rank} is out of range: the mesh has {}", self.ranks());
        let mut coord = Coord { pipe: 0, data: 0, context: 0, tensor: 0 };
        let mut rest = rank;
        for axis in self.order.into_iter().rev() {
            let size = self.size(axis);
            *coord.on_mut(axis) = rest % size;
            rest /= size;
        }
        coord
    }

    pub fn rank(&self, coord: Coord) -> usize {
        self.order.into_iter().fold(0, |rank, axis| rank * self.size(axis) + coord.on(axis))
    }

    /// Index of a rank among the ranks with the same dense parameters.
    pub fn replica(&self, coord: Coord) -> usize {
        coord.data * self.context + coord.context
    }

    /// Ranks that shard the states of the same experts: the largest number within a shard that divides the replicas
    /// evenly.
    pub fn expert_shard(&self) -> usize {
        let even = |ranks: &usize| self.replicas().is_multiple_of(self.expert * ranks);
        (1..=self.shard / self.expert).rev().find(even).unwrap_or(1)
    }

    /// Ranks of a rank's group, ordered by coordinates.
    pub fn members(&self, kind: GroupKind, rank: usize) -> Vec<usize> {
        let key = self.key(kind, self.coord(rank));
        let mut members: Vec<(Coord, usize)> = (0..self.ranks())
            .map(|other| (self.coord(other), other))
            .filter(|(coord, _)| self.key(kind, *coord) == key)
            .collect();
        members.sort_unstable();
        members.into_iter().map(|(_, rank)| rank).collect()
    }

    /// Ranks with equal keys form a group.
    fn key(&self, kind: GroupKind, coord: Coord) -> [usize; 4] {
        let Coord { pipe, data, context, tensor } = coord;
        let replica = self.replica(coord);
        let experts = self.expert * self.expert_shard();
        match kind {
            GroupKind::Tensor => [pipe, data, context, 0],
            GroupKind::Keys => [pipe, data, context, tensor / self.keys],
            GroupKind::Context => [pipe, data, tensor, 0],
            GroupKind::Pipe => [data, context, tensor, 0],
            // Each stage in between is a group of one.
            GroupKind::Ends => {
                [data, context, tensor, if pipe + 1 == self.pipe { 0 } else { pipe }]
            }
            GroupKind::Replicas => [pipe, tensor, 0, 0],
            GroupKind::Shard | GroupKind::Gather => [pipe, tensor, replica / self.shard, 0],
            GroupKind::Copies => [pipe, tensor, replica % self.shard, 0],
            GroupKind::Expert => [pipe, tensor, replica / self.expert, 0],
            GroupKind::ExpertShard | GroupKind::ExpertGather => {
                [pipe, tensor, replica / experts, replica % self.expert]
            }
            GroupKind::ExpertCopies => [pipe, tensor, replica % experts, 0],
        }
    }
}

impl Coord {
    pub fn on(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipe => self.pipe,
            Axis::Data => self.data,
            Axis::Context => self.context,
            Axis::Tensor => self.tensor,
        }
    }

    fn on_mut(&mut self, axis: Axis) -> &mut usize {
        match axis {
            Axis::Pipe => &mut self.pipe,
            Axis::Data => &mut self.data,
            Axis::Context => &mut self.context,
            Axis::Tensor => &mut self.tensor,
        }
    }
}
