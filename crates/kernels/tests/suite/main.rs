//! Fast equals reference: every operation at every level of this machine, stored as f32 and bf16, on odd
//! sizes, by one thread and by several. One binary, to link once.

mod adamw;
mod attention;
mod check;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod gelu;
mod gemm;
mod gemm_bits;
mod norm;
mod quantize;
mod random;
mod reduce;
mod rope;
mod routing;
mod runs;
mod swiglu;
mod top_k;
