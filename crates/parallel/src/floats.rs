//! Collectives on tensors, whatever their type.

use half::bf16;
use lockstep_comm::{Group, Op, Result};
use lockstep_kernels::{Dtype, View, ViewMut};

/// Sums over the group, in place.
pub fn all_reduce(group: &Group, x: ViewMut<'_>) -> Result<()> {
    match x.dtype() {
        Dtype::F32 => group.all_reduce(x.host::<f32>(), Op::Sum),
        Dtype::Bf16 => group.all_reduce(x.host::<bf16>(), Op::Sum),
        dtype => panic!("reductions are in f32 or bf16, not in {dtype}"),
    }
}

/// Puts the shares of all members side by side.
pub fn all_gather(group: &Group, share: View<'_>, all: ViewMut<'_>) -> Result<()> {
    match share.dtype() {
        Dtype::F32 => group.all_gather(share.host::<f32>(), all.host::<f32>()),
        Dtype::Bf16 => group.all_gather(share.host::<bf16>(), all.host::<bf16>()),
        dtype => panic!("reductions are in f32 or bf16, not in {dtype}"),
    }
}

/// Sums over the group; each member gets its share.
pub fn reduce_scatter(group: &Group, all: View<'_>, share: ViewMut<'_>) -> Result<()> {
    match all.dtype() {
        Dtype::F32 => group.reduce_scatter(all.host::<f32>(), share.host::<f32>(), Op::Sum),
        Dtype::Bf16 => group.reduce_scatter(all.host::<bf16>(), share.host::<bf16>(), Op::Sum),
        dtype => panic!("reductions are in f32 or bf16, not in {dtype}"),
    }
}

/// Adds what is here already, on whatever thread that is wanted.
pub fn add(sum: ViewMut<'_>, more: View<'_>) {
    match more.dtype() {
        Dtype::F32 => {
            let pairs = sum.host::<f32>().iter_mut().zip(more.host::<f32>());
            pairs.for_each(|(sum, more)| *sum += more);
        }
        Dtype::Bf16 => {
            let pairs = sum.host::<bf16>().iter_mut().zip(more.host::<bf16>());
            pairs.for_each(|(sum, more)| *sum = bf16::from_f32(sum.to_f32() + more.to_f32()));
        }
        dtype => panic!("reductions are in f32 or bf16, not in {dtype}"),
    }
}

/// Rows go to members and come from them: so many to and from each, side by side in both.
pub fn all_to_all_v(
    group: &Group,
    rows: View<'_>,
    sent: &[usize],
    come: ViewMut<'_>,
    received: &[usize],
) -> Result<()> {
    let elements = |rows: &[usize], cols: usize| rows.iter().map(|rows| rows * cols).collect();
    let sent: Vec<usize> = elements(sent, rows.cols());
    let received: Vec<usize> = elements(received, rows.cols());
    match rows.dtype() {
        Dtype::F32 => group.all_to_all_v(rows.host::<f32>(), &sent, come.host(), &received),
        Dtype::Bf16 => group.all_to_all_v(rows.host::<bf16>(), &sent, come.host(), &received),
        dtype => panic!("reductions are in f32 or bf16, not in {dtype}"),
    }
}
