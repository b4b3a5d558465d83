//! Device memory: a pool that allocates nothing in the steady state, tensors that own a piece of it, views that
//! borrow one, and counters by purpose. Knows no operations.

mod location;
mod pool;
mod tensor;
mod usage;
mod view;

pub use location::Location;
pub(crate) use pool::Pool;
pub use tensor::Tensor;
pub use usage::{MemoryUsage, Tag, Usage};
pub use view::{View, ViewMut};
