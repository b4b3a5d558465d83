//! Every operation once more, in plain loops and f64: what it means, to be read, and what the fast versions
//! are held against. Never used in training.

pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod gemm;
pub mod norm;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod routing;
pub mod swiglu;
pub mod top_k;
