//! The forward and backward pass in bf16 on AMX: operands of products are bf16, sums are f32. Rows of a tile are keys
//! and columns are queries, so that one product leaves the probabilities in the layout that the next one needs, and
//! nothing is transposed between them.
//!
//! Outputs and gradients of queries are accumulated transposed, (dim, rows), and transposed back once per block.

pub(super) mod backward;
pub(super) mod forward;
mod pack;
mod product;
mod softmax;
