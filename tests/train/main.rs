//! Tests of the binary on small run files: `lockstep train`, `generate` and `bench step`.

mod bench_step;
mod checkpoints_and_data;
mod errors;
#[path = "../program/mod.rs"]
mod program;
mod runs;
mod weights;
mod workspace;
