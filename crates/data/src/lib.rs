//! What is trained on: token files and the batches that are cut from them. A batch is a pure function of
//! (seed, step, index): there is no position to save, no worker to restart, and the global batch is the
//! same whatever the layout. Knows nothing of ranks, devices or models.
//!
//! ```
//! use lockstep_data::{Options, Source, Split};
//!
//! let source = Source::open("builtin:grammar", &Options::default())?;
//! let mut tokens = [0; 129];
//! // Sample 5 of the 32 of step 1,000, under seed 42: 128 inputs and their successors.
//! source.sample(Split::Train, 42, 1000, 32, 5, &mut tokens);
//! let floor = source.entropy(128).unwrap();
//! assert!((0.57..0.58).contains(&floor), "the best loss that a model can reach: {floor} nats");
//! # Ok::<(), lockstep_data::Error>(())
//! ```

mod chance;
mod corpus;
mod error;
mod grammar;
mod permutation;
mod prepare;
mod source;
mod tokenizer;
mod tokens;

pub use corpus::{Piece, Split};
pub use error::{BadRow, Error, Result};
pub use grammar::Grammar;
pub use permutation::Permutation;
pub use prepare::{Format, Made, Recipe, Report, prepare, size_of};
pub use source::{GRAMMAR, Options, Source};
pub use tokenizer::Tokenizer;
pub use tokens::{Cause, Damage, TokenFile, Width};
