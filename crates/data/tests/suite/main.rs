//! Preparing, reading and sampling, through the public interface, on real files.

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
