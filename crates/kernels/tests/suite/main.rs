//! Every operation matches its reference: at every SIMD level of this machine, in f32 and bf16, on odd sizes, on one
//! thread and on several. All tests are one binary, to link once.

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
