//! Models held against themselves: gradients against differences, recomputed against kept, one pass against
//! several, cached against whole. Against PyTorch they are held where checkpoints can be read.

mod cache;
mod experts;
mod gradients;
mod setup;
