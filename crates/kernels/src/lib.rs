//! Contiguous tensors on a device and the operations on them, forward and backward. Knows nothing of ranks,
//! and allocates nothing in the hot path.

pub mod cpu;
mod dtype;
mod memory;
mod team;

pub use dtype::{Dtype, Element, Float};
pub use memory::{Memory, Pool, Tag, Tensor, Usage, View, ViewMut};
pub use team::Team;
