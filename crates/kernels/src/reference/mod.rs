//! The operations as one would write them on paper, in f64 and in no hurry: what the fast ones are held
//! against. Nothing that trains calls them.

pub mod attention;
pub mod gemm;
pub mod rope;
