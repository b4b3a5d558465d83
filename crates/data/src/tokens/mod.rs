//! Token files: tokenized documents with an index and checksums. README.md describes the format. A published file is
//! never modified.

mod damage;
mod header;
mod partial;
mod reader;
mod writer;

pub use damage::{Cause, Damage};
pub use header::Width;
pub use reader::TokenFile;
pub(crate) use writer::Writer;
