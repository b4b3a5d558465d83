//! Preparing, reading and sampling of real files through the public interface.

mod batches;
mod corrupt;
mod damage;
mod formats;
mod grammar;
#[cfg(feature = "tokenizers")]
mod hugging_face;
#[cfg(feature = "parquet")]
mod parquet;
mod test_dir;
