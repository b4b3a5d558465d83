//! Placement of the process groups that a rank belongs to.

use lockstep_plan::Axis;

use super::Case;
use crate::GroupPlacement;

impl Case<'_> {
    /// Distance in ranks between neighbours along an axis.
    fn stride(&self, axis: Axis) -> usize {
        let order = self.mesh.order;
        let at = order.iter().position(|other| *other == axis).unwrap_or(0);
        order[at + 1..].iter().map(|inner| self.mesh.size(*inner)).product()
    }

    pub fn tensor(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.tensor, stride: self.stride(Axis::Tensor) }
    }

    pub fn context(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.context, stride: self.stride(Axis::Context) }
    }

    pub fn pipeline(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.pipe, stride: self.stride(Axis::Pipe) }
    }

    /// Ranks with the same dense parameters.
    pub fn replicas(&self) -> GroupPlacement {
        let [data, context] = [Axis::Data, Axis::Context].map(|axis| self.stride(axis));
        let closest = match (self.mesh.data, self.mesh.context) {
            (_, 1) => data,
            (1, _) => context,
            _ => self.mixed(data, context),
        };
        GroupPlacement { members: self.mesh.replicas(), stride: closest }
    }

    /// Equivalent stride of replicas that extend over two axes with strides `data` and `context`: it puts as many of
    /// them on one closest link as there really are.
    fn mixed(&self, data: usize, context: usize) -> usize {
        let span = self.cluster.links[0].span.unwrap_or(self.mesh.ranks());
        let near = |stride: usize, size: usize| (span / stride).clamp(1, size);
        let together = near(data, self.mesh.data) * near(context, self.mesh.context);
        (span / together).max(data.min(context))
    }

    /// Replicas that shard states among themselves.
    pub fn shard(&self) -> GroupPlacement {
        GroupPlacement { members: self.mesh.shard, ..self.replicas() }
    }

    /// Replicas that hold the same shard.
    pub fn copies(&self) -> GroupPlacement {
        let all = self.replicas();
        GroupPlacement {
            members: all.members / self.mesh.shard,
            stride: all.stride * self.mesh.shard,
        }
    }

    /// Ranks that exchange tokens with each other's experts.
    pub fn experts(&self) -> GroupPlacement {
        let replicas = self.replicas();
        let members = self.mesh.expert * self.tensor_experts as usize;
        let inside = self.tensor().stride.min(replicas.stride);
        GroupPlacement {
            members,
            stride: if self.tensor_experts > 1.0 { inside } else { replicas.stride },
        }
    }

    /// Ranks with the same experts.
    pub fn same_experts(&self) -> GroupPlacement {
        let all = self.replicas();
        GroupPlacement {
            members: all.members / self.mesh.expert,
            stride: all.stride * self.mesh.expert,
        }
    }
}
