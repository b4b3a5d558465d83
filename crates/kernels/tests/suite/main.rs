//! Fast kernels against plain references, at every level of this machine. One binary, to link once.

mod attention;
mod gemm;
mod rope;
//! Fast equals reference: every operation at every level of this machine, stored as f32 and bf16, on odd
//! sizes, by one thread and by three. One binary, to link once.
mod adamw;
mod check;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod gelu;
mod norm;
mod random;
mod reduce;
mod routing;
mod swiglu;
