//! The operations as their formulas read, in plain loops: what the fast kernels are held against. Never fast.

pub mod gemm;
