//! Training data: token files and the samples of each batch. A sample is a pure function of (seed, batch, index), so
//! there is no loader state to save and the global batch does not depend on the layout. Knows nothing about ranks,
//! devices or models.
//!
//! ```
//! use lockstep_data::{Options, SampleId, Source, Split};
//!
//! let source = Source::open("builtin:grammar", &Options::default())?;
//! let mut tokens = [0; 129];
//! // Sample 5 of the 32 in batch 1,000 with seed 42: 128 inputs and their targets.
//! let id = SampleId { split: Split::Train, seed: 42, batch: 1000, global_batch: 32, index: 5 };
//! source.sample(id, &mut tokens);
//! let floor = source.entropy(128).unwrap();
//! assert!((0.57..0.58).contains(&floor), "lowest loss that a model can reach: {floor} nats");
//! # Ok::<(), lockstep_data::Error>(())
//! ```

mod corpus;
mod error;
mod grammar;
mod permutation;
mod prepare;
mod random;
mod source;
mod tokenizer;
mod tokens;

pub use corpus::{Piece, Split};
pub use error::{BadRow, Error, Result};
pub use grammar::Grammar;
pub use permutation::Permutation;
pub use prepare::{Format, PreparedFile, Recipe, Report, input_bytes, prepare};
pub use source::{GRAMMAR, Options, SampleId, Source};
pub use tokenizer::{StoredTokenizer, TOKENIZER_FILES, Tokenizer};
pub use tokens::{Cause, Damage, TokenFile, Width};
