//! Where each rank stands: the axes of the mesh, and who shares what with whom.

use serde::{Deserialize, Serialize};

/// A direction of the mesh.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Stages of the model, one after the other.
    Pipe,
    /// Replicas, each on its own samples.
    Data,
    /// Pieces of each sequence.
    Context,
    /// Pieces of each matrix.
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

/// How many ranks there are along each axis.
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
    /// Ranks among which the experts are dealt out: a divisor of `data × context`.
    pub expert: usize,
    /// Ranks among which ZeRO cuts states: a divisor of `data × context`; the rest are copies.
    pub shard: usize,
    /// Ranks of `context` that exchange heads instead of keys: Ulysses'. The others form rings.
    pub ulysses: usize,
    /// Ranks of `tensor` that share a head of keys, when there are fewer of these than ranks.
    pub keys: usize,
    /// From the outermost axis to the innermost, whose ranks are neighbours.
    pub order: [Axis; 4],
}

/// Where a rank stands on each axis.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct Coord {
    pub pipe: usize,
    pub data: usize,
    pub context: usize,
    pub tensor: usize,
}

/// Ranks that exchange something.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// Pieces of the same matrices.
    Tensor,
    /// Of these, the ones that hold the same heads of keys.
    Keys,
    /// Pieces of the same sequences.
    Context,
    /// The stages of one pipeline.
    Pipe,
    /// Its first and its last stage, which share a tied embedding.
    Ends,
    /// All that hold the same dense parameters: data × context.
    Replicas,
    /// Of these, the ones that cut states among them.
    Shard,
    /// The same ranks once more, for gathering parameters while gradients are on their way.
    Gather,
    /// Of all replicas, the ones that hold the same piece.
    Copies,
    /// Among which tokens go to experts.
    Expert,
    /// As `Shard`, of those that hold the same experts.
    ExpertShard,
    /// As `Gather`, of those that hold the same experts.
    ExpertGather,
    /// As `Copies`, of those that hold the same experts.
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
    /// One device is a mesh of one.
    pub const ONE: Mesh = Mesh {
        pipe: 1,
        data: 1,
        context: 1,
        tensor: 1,
        expert: 1,
        shard: 1,
        ulysses: 1,
        keys: 1,
        // What is said most goes over the closest links.
        order: [Axis::Pipe, Axis::Data, Axis::Context, Axis::Tensor],
    };

    pub fn ranks(&self) -> usize {
        self.pipe * self.replicas() * self.tensor
    }

    /// Ranks that hold the same dense parameters.
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
        assert!(rank < self.ranks(), "rank {rank} of {}", self.ranks());
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

    /// A rank's number among those that hold the same dense parameters.
    pub fn replica(&self, coord: Coord) -> usize {
        coord.data * self.context + coord.context
    }

    /// Ranks that cut the states of the same experts among them: as many of a shard as deal the replicas
    /// out evenly.
    pub fn expert_shard(&self) -> usize {
        let even = |ranks: &usize| self.replicas().is_multiple_of(self.expert * ranks);
        (1..=self.shard / self.expert).rev().find(even).unwrap_or(1)
    }

    /// Who is in a rank's group, in the order of their coordinates.
    pub fn members(&self, kind: GroupKind, rank: usize) -> Vec<usize> {
        let key = self.key(kind, self.coord(rank));
        let mut members: Vec<(Coord, usize)> = (0..self.ranks())
            .map(|other| (self.coord(other), other))
            .filter(|(coord, _)| self.key(kind, *coord) == key)
            .collect();
        members.sort_unstable();
        members.into_iter().map(|(_, rank)| rank).collect()
    }

    /// Ranks of the same key form a group.
    fn key(&self, kind: GroupKind, coord: Coord) -> [usize; 4] {
        let Coord { pipe, data, context, tensor } = coord;
        let replica = self.replica(coord);
        let experts = self.expert * self.expert_shard();
        match kind {
            GroupKind::Tensor => [pipe, data, context, 0],
            GroupKind::Keys => [pipe, data, context, tensor / self.keys],
            GroupKind::Context => [pipe, data, tensor, 0],
            GroupKind::Pipe => [data, context, tensor, 0],
            // Stages between them are alone.
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
