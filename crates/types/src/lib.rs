//! Enums that several crates of the bottom row share: element types, collectives and operation classes.
//! Contains no computation and no I/O.

mod collective;
mod dtype;
mod op_class;

pub use collective::Collective;
pub use dtype::{Dtype, Element, bytes_of, bytes_of_mut};
pub use op_class::OpClass;
