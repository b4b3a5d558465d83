//! Placement of ranks: the order of the axes that minimizes traffic between hosts.
//!
//! Ranks of a host are consecutive, so the innermost axis has the closest links. Groups that fit inside a host cause
//! no traffic between hosts.

use crate::mesh::{Axis, Mesh};
use crate::plan::Plan;
use crate::reduction::ReductionPolicy;

/// Approximate bytes that a rank sends along each axis in one optimizer step; only large collectives are counted.
pub fn axis_traffic(plan: &Plan) -> [(Axis, f64); 4] {
    let (mesh, shape) = (plan.mesh(), &plan.model);
    let width = plan.precision.compute.bytes() as f64;
    let tokens = (plan.train.micro_batch * plan.data.seq / mesh.context) as f64;
    let passes = (plan.train.accumulation * shape.layers.div_ceil(mesh.pipe)) as f64;
    let stream = tokens * shape.dim as f64 * width;
    let others = |ranks: usize| (ranks - 1) as f64 / ranks as f64;
    let params = shape.param_count() as f64 / (mesh.pipe * mesh.tensor) as f64;
    // Attention and feed-forward all-reduce once forward and once backward; a ring all-reduce sends 2(P-1)/P.
    let tensor = 8.0 * others(mesh.tensor) * stream * passes;
    // Keys and values circulate forward and backward, and their gradients backward.
    let keys = (shape.kv_heads * (shape.head_dim + shape.value_dim())) as f64 / mesh.tensor as f64;
    let context = 3.0 * (mesh.context - 1) as f64 * tokens * keys * width * passes;
    // Each routed row goes to its expert and back, forward and backward.
    let mixtures = shape.expert_layers() as f64 / shape.layers as f64;
    let slots = shape.moe.map_or(0.0, |moe| moe.top_k as f64 * stream * passes * mixtures);
    let experts = 4.0 * others(mesh.expert) * slots;
    let [gathers, reductions] = ReductionPolicy::of(plan).sends_per_step();
    let state_bytes = gathers * width + reductions * plan.precision.gradients.bytes() as f64;
    let data = state_bytes * others(mesh.replicas()) * params + experts;
    let pipe = if mesh.pipe == 1 { 0.0 } else { 2.0 * stream * plan.train.accumulation as f64 };
    [(Axis::Pipe, pipe), (Axis::Data, data), (Axis::Context, context), (Axis::Tensor, tensor)]
}

/// The axis order, outermost first, with the least traffic between hosts of `per_host` ranks. Ties go to the order
/// closest to the default.
///
/// ```
/// use lockstep_plan::{Axis::*, Mesh, placement};
///
/// // Four ranks per host: the axis with more traffic stays inside a host.
/// let mesh = Mesh { data: 4, tensor: 2, pipe: 2, ..Mesh::ONE };
/// let order = placement::order(&mesh, 4, &[(Tensor, 9.0), (Data, 3.0), (Pipe, 1.0)]);
/// assert_eq!(order, [Pipe, Data, Context, Tensor]);
/// let order = placement::order(&mesh, 4, &[(Tensor, 1.0), (Data, 9.0), (Pipe, 1.0)]);
/// assert_eq!(order, [Pipe, Context, Tensor, Data]);
/// ```
pub fn order(mesh: &Mesh, per_host: usize, traffic: &[(Axis, f64)]) -> [Axis; 4] {
    let default = Mesh::ONE.order;
    let cost = |order: &[Axis; 4]| {
        let mesh = Mesh { order: *order, ..*mesh };
        traffic.iter().map(|(axis, bytes)| bytes * crossing(&mesh, *axis, per_host)).sum::<f64>()
    };
    // Permutations come sorted by similarity to the default, and the first of equal cost wins.
    let mut best = (cost(&default), default);
    for order in permutations(default) {
        let cost = cost(&order);
        if cost < best.0 * (1.0 - 1e-9) {
            best = (cost, order);
        }
    }
    best.1
}

/// Whether groups along an axis span several hosts of `per_host` ranks.
pub(crate) fn crosses_hosts(mesh: &Mesh, axis: Axis, per_host: usize) -> bool {
    crossing(mesh, axis, per_host) > 0.0
}

/// Fraction of neighbours along an axis that are on different hosts.
fn crossing(mesh: &Mesh, axis: Axis, per_host: usize) -> f64 {
    let size = mesh.size(axis);
    if size == 1 {
        return 0.0;
    }
    let position = mesh.order.iter().position(|other| *other == axis).unwrap_or(0);
    let stride: usize = mesh.order[position + 1..].iter().map(|axis| mesh.size(*axis)).product();
    let per_group = (per_host / stride).clamp(1, size);
    // In a ring, one of `per_group` steps leaves the host.
    if per_group == size { 0.0 } else { 1.0 / per_group as f64 }
}

/// All permutations of the axes, the given one first.
pub fn permutations(axes: [Axis; 4]) -> Vec<[Axis; 4]> {
    let mut all = Vec::with_capacity(24);
    for a in 0..4 {
        for b in (0..4).filter(|b| *b != a) {
            for c in (0..4).filter(|c| ![a, b].contains(c)) {
                all.push([axes[a], axes[b], axes[c], axes[6 - a - b - c]]);
            }
        }
    }
    all
}
