//! Every operation of `Device` matches its f64 reference, and gives the same bits twice, on the device that
//! `LOCKSTEP_DEVICE` selects: in f32 and bf16, on odd sizes, on aligned and unaligned views. Data is only written and
//! read through the device.

mod adamw;
mod attention;
mod check;
mod cross_entropy;
mod elementwise;
mod embedding;
mod fp8;
mod grouped;
mod matmul;
mod memory;
mod mlp;
mod norm;
mod pack;
mod random;
mod reduce;
mod repeated;
mod rope;
mod routing;
mod top_k;
mod vocabulary_shards;
