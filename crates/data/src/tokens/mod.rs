//! Token files: documents as tokens, kept apart, with checksums over all of it.
//! README.md beside this file has the format. Never changes a file that has its name.

mod damage;
mod header;
mod partial;
mod reader;
mod writer;

pub use damage::{Cause, Damage};
pub use header::Width;
pub use reader::TokenFile;
pub(crate) use writer::Writer;
