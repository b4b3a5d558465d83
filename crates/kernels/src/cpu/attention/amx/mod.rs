//! The same passes in bf16 on the matrix unit: sums in f32, and what goes into a product rounded to bf16, as
//! it is where it comes from. Everything stands keys down and queries across, so that probabilities come out
//! of one product in the order in which the next one takes them: nothing is turned between products.
//!
//! Sums over queries' outputs grow turned, (dim, rows), and are turned back once per block.

pub(super) mod backward;
pub(super) mod forward;
mod pack;
mod softmax;
mod tiles;
