//! Reads tables from files. Each rank reads only its rows, on all of its threads.

mod csv;
mod libsvm;
mod npy;
mod number;
#[cfg(feature = "parquet")]
mod parquet;
mod piece;
mod read;
mod schema;
mod spill;
mod table;
mod text;

pub use read::{Format, Reader, read};
pub use schema::Schema;
pub use table::{Chunk, Store, Table, Values};
pub(crate) use text::map as map_file;
