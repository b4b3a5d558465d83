//! Fast kernels against plain references, at every level of this machine. One binary, to link once.

mod attention;
mod gemm;
mod rope;
