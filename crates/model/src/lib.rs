//! Transformers as lists of blocks with explicit forward and backward passes on flat parameters: GPT-2, Llama and
//! mixtures of experts. Blocks communicate through their [`Groups`]; a single rank runs the same code with groups of
//! one.
//!
//! ```
//! use lockstep_kernels::{Device, Dtype};
//! use lockstep_model::{Activations, Batch, Groups, Model, Pass, Recompute, Store};
//! use lockstep_plan::presets;
//!
//! let shape = presets::shape("llama-test", Some(64)).unwrap();
//! let device = Device::cpu(1);
//! let model = Model::whole(&shape);
//! let mut store = Store::alone(&device, &model.part, Dtype::F32, 1);
//!
//! // Two sequences of 8 tokens, each followed by the target of its last token.
//! let mut batch = Batch::empty(&device, 2, 8);
//! batch.fill(&device, &(0..2 * 9).collect::<Vec<u32>>());
//! let (groups, dtype, recompute) = (&Groups::alone(), Dtype::F32, Recompute::None);
//! let (dropout, loads, offload, fp8) = (None, None, Default::default(), None);
//! let pass = Pass { device: &device, groups, dtype, recompute, dropout, global_tokens: 16, loads, offload, fp8 };
//!
//! let loss = model.train(&pass, &batch, &mut store, &mut Activations::default());
//! // An untrained model predicts all tokens with about the same probability.
//! assert!((loss.sum / 16.0 - (64f64).ln()).abs() < 0.1);
//! // One flat gradient per block: the embedding, two layers, the head.
//! for (number, block) in model.part.blocks.iter().enumerate() {
//!     assert_eq!(store.gradients.get(number).unwrap().len(), block.len());
//! }
//! ```
//!
//! [`Block`] shows how to add a block to a model.

mod activations;
mod attention;
mod batch;
mod block;
mod ctx;
mod dense;
mod embed;
mod feed_forward;
mod fp8;
mod generate;
mod head;
mod layer;
mod linear;
mod model;
mod moe;
mod norm;
mod offload;
mod residual;
mod sample;
mod slot;
mod transformer;
mod weight_grads;

pub use activations::{Activations, Loss, PendingLoss};
pub use batch::Batch;
pub use block::Block;
pub use ctx::{Ctx, Dropout};
pub use fp8::Fp8;
pub use generate::Cache;
pub use lockstep_parallel::{Groups, Store, Weights};
pub use lockstep_plan::Recompute;
pub use model::{Model, Pass, StagePass};
pub use moe::{Auxiliary, ExpertLoads};
pub use offload::{Offloading, PendingUpdates};
pub use sample::{Sampling, sample};
pub use slot::Slot;
pub use transformer::Transformer;
pub use weight_grads::{Deferred, WeightGrads};
