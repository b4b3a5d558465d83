//! Reads tables from files. Each rank reads only its rows, on all of its threads.

#[cfg(feature = "arrow")]
mod arrow;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod cell;
mod csv;
mod libsvm;
mod memory;
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

pub(crate) use memory::available_memory;
pub use read::{Format, Reader, SpillTo, read};
pub use schema::Schema;
pub use table::{Chunk, Store, Table, Values};
pub(crate) use text::map as map_file;
