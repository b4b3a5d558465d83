//! Transformers as lists of blocks with explicit forward and backward on flat parameters: GPT-2, Llama,
//! mixture of experts. Knows no ranks: what is exchanged between them happens on the flat buffers.

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
