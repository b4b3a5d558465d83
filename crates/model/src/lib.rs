//! Transformers as lists of blocks with explicit forward and backward on flat parameters: GPT-2, Llama,
//! mixture of experts. Knows no ranks: what is exchanged between them happens on the flat buffers.
//!
//! ```
//! use lockstep_kernels::{Device, Dtype};
//! use lockstep_model::{Batch, Gradients, Model, Pass, Recompute, Tape, Weights};
//! use lockstep_plan::presets;
//!
//! let shape = presets::shape("llama-test", Some(64)).unwrap();
//! let device = Device::cpu(1);
//! let model = Model::new(&shape);
//! let weights = Weights::init(&device, &shape, Dtype::F32, 1);
//!
//! // Two sequences of 8 tokens, each with the token that follows its last.
//! let mut batch = Batch::empty(&device, 2, 8);
//! batch.fill(&device, &(0..2 * 9).collect::<Vec<u32>>());
//! let pass = Pass { dtype: Dtype::F32, recompute: Recompute::None, dropout: None, global_tokens: 16 };
//!
//! let (mut gradients, mut tape) = (Gradients::new(model.blocks()), Tape::default());
//! let loss = model.train(&device, &weights, &batch, &pass, &mut gradients, &mut tape);
//! // Nothing is learned yet: every token is about equally likely.
//! assert!((loss.sum / 16.0 - (64f64).ln()).abs() < 0.1);
//! // One flat gradient for each block: the embedding, two layers, the head.
//! let lengths: Vec<usize> = gradients.iter().map(|(_, gradient)| gradient.len()).collect();
//! assert_eq!(lengths, weights.layout.iter().map(|block| block.len()).collect::<Vec<_>>());
//! ```
//!
//! A network of one's own is a list of [`Block`]s; [`Layer`] is the one that is here.

mod attention;
mod block;
mod embed;
mod feed_forward;
mod generate;
mod gradients;
mod head;
mod layer;
mod linear;
mod moe;
mod network;
mod norm;
mod stream;
mod weights;

pub use block::{Block, Cx, Dropout, Recompute};
pub use generate::{Cache, Sampling, sample};
pub use gradients::{Deferred, Gradients, Sink};
pub use layer::{Layer, Saved};
pub use moe::Auxiliary;
pub use network::{Batch, Loss, Model, Pass, Tape};
pub use weights::Weights;
