//! Reference implementations of all operations: plain f64 loops that define the results. The fast versions are
//! tested against them. Never used in training.

pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod fp8;
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
