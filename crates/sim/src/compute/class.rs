//! Compute time by operation class: the classes by which `bench step` measures a running step, so that predicted and
//! measured times can be compared.

pub use lockstep_types::OpClass;

/// Seconds of each operation class.
pub type ByClass = [f64; OpClass::ALL.len()];

/// Whether all model families do the same amount of work per element in operations of this class.
pub fn same_in_all_families(class: OpClass) -> bool {
    use OpClass::{Attention, Loss, Matmul, Optimizer};
    matches!(class, Matmul | Attention | Loss | Optimizer)
}
