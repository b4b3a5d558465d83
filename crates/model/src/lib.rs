//! Transformers as lists of blocks with explicit forward and backward on flat parameters: GPT-2, Llama,
//! mixture of experts. What ranks
//! exchange inside a block is asked of its peers; a rank alone has none, and the same code.
//!
//! ```
//! use lockstep_kernels::{Device, Dtype};
//! use lockstep_model::{Batch, Activations, Model, Pass, Groups, Recompute, Store};
//! use lockstep_plan::presets;
//!
//! let shape = presets::shape("llama-test", Some(64)).unwrap();
//! let device = Device::cpu(1);
//! let model = Model::whole(&shape);
//! let mut store = Store::alone(&device, &model.part, Dtype::F32, 1);
//!
//! // Two sequences of 8 tokens, each with the token that follows its last.
//! let mut batch = Batch::empty(&device, 2, 8);
//! batch.fill(&device, &(0..2 * 9).collect::<Vec<u32>>());
//! let (peers, dtype, recompute) = (&Groups::alone(), Dtype::F32, Recompute::None);
//! let pass = Pass { device: &device, peers, dtype, recompute, dropout: None, global_tokens: 16 };
//!
//! let loss = model.train(&pass, &batch, &mut store, &mut Activations::default());
//! // Nothing is learned yet: every token is about equally likely.
//! assert!((loss.sum / 16.0 - (64f64).ln()).abs() < 0.1);
//! // One flat gradient for each block: the embedding, two layers, the head.
//! for (number, block) in model.part.blocks.iter().enumerate() {
//!     assert_eq!(store.gradients.get(number).unwrap().len(), block.len());
//! }
//! ```
//!
//! A network of one's own is a list of [`Block`]s; [`Layer`] is the one that is here.

mod attention;
mod batch;
mod block;
mod embed;
mod feed_forward;
mod generate;
mod head;
mod layer;
mod linear;
mod moe;
mod network;
mod norm;
mod stream;
mod weight_grads;

pub use batch::Batch;
pub use block::{Block, Ctx, Dropout};
pub use generate::{Cache, Sampling, sample};
pub use layer::{Layer, Saved};
pub use lockstep_parallel::{Groups, Store, Weights};
pub use lockstep_plan::Recompute;
pub use moe::Auxiliary;
pub use network::{Activations, Loss, Model, Pass, WeightGradients, read};
pub use weight_grads::{Deferred, WeightGrads};
