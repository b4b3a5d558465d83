//! Contiguous tensors on a device and the operations on them, forward and backward. Knows nothing of ranks,
//! and allocates nothing in the hot path.

pub mod cpu;
mod device;
mod dtype;
mod memory;
pub mod reference;
mod team;

pub use cpu::rope::{Llama3 as RopeScaling, Table as RopeTable};
pub use device::{
    AdamW, Attention, CrossEntropy, Device, Gradient, Matmul, Meter, Operation, Router, Stepped,
    balance_loss,
};
pub use dtype::{Dtype, Element, Float};
pub use memory::{Memory, Pool, Tag, Tensor, Usage, View, ViewMut};
pub use team::Team;
