//! The safetensors format: eight bytes of header length, a JSON header of names, types, shapes and offsets, and
//! the tensors' bytes in little-endian order without gaps.

mod dtype;
mod read;
mod write;

pub use dtype::Dtype;
pub use read::{File, Tensor};
pub(crate) use write::header;
pub use write::{Entry, write};

/// Header key for metadata.
const METADATA: &str = "__metadata__";
