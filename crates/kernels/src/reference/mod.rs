//! The operations as one would write them on paper, in f64 and in no hurry: what the fast ones are held
//! against. Nothing that trains calls them.

pub mod attention;
pub mod gemm;
pub mod rope;
//! Every operation once more, in plain loops and f64: what it means, to be read, and what the fast versions
//! are held against. Never used in training.
pub mod adamw;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod norm;
pub mod random;
pub mod reduce;
pub mod routing;
pub mod swiglu;
