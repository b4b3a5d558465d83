//! Device memory: a pool that allocates nothing in the steady state, tensors that own a piece of it, views that
//! borrow one, and counters by purpose. Knows no operations.

mod location;
mod out_of_memory;
mod pool;
mod region;
mod tensor;
mod usage;
mod view;

pub use location::Location;
pub use out_of_memory::OutOfMemory;
pub(crate) use pool::{Pool, Side};
pub use tensor::Tensor;
pub use usage::{MemoryUsage, Tag, Usage};
pub(crate) use view::Extent;
pub use view::{View, ViewMut};
