//! Types and constants that several crates of the bottom row share: element types, collectives, operation classes, and
//! the recorder of spans. Contains no computation and no I/O.

mod collective;
mod device_engine;
mod device_type;
mod dtype;
mod op_class;
pub mod trace;

pub use collective::Collective;
pub use device_engine::DeviceEngine;
pub use device_type::DeviceType;
pub use dtype::{Dtype, Element, bytes_of, bytes_of_mut};
pub use op_class::OpClass;

/// Matrix products with at most this many rows use another kernel, which sums in another order. Splitting the rows of a
/// product keeps its bits only if every part has more.
pub const SMALL_GEMM_ROWS: usize = 8;
