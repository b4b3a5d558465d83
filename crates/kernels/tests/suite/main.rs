//! The fast kernels, held against the reference.

mod gemm;
