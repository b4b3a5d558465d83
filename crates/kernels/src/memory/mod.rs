//! Device memory: who holds how much of it and why, a pool that hands it out without allocating in the
//! steady state, tensors that own a piece of it and views that borrow one. Knows no operations.

mod count;
mod pool;
mod tensor;
mod view;

pub use count::{Memory, Tag, Usage};
pub use pool::Pool;
pub use tensor::Tensor;
pub use view::{View, ViewMut};
