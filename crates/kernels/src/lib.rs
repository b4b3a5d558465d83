//! Contiguous tensors on a device and the operations on them, forward and backward. Knows nothing of ranks,
//! and allocates nothing in the hot path.

pub mod cpu;
mod dtype;
pub mod reference;
mod team;

pub use dtype::{Dtype, Element, Float};
pub use team::Team;
