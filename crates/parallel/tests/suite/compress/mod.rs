//! Compressed reductions: equal on all ranks, with nothing lost over the steps, the predicted bytes, and convergence.

mod cost;
mod learning;
mod residual;
mod sums;
mod traffic;

use lockstep_comm::{World, shard_range};
use lockstep_kernels::{Device, RandomKey, View, ViewMut};
use lockstep_parallel::compress::{Compressor, CompressorState};
use lockstep_plan::Compression;

pub const LOSSY: [Compression; 5] = [
    Compression::Bf16,
    Compression::F16,
    Compression::Int8,
    Compression::TopK(0.01),
    Compression::TopK(1.0),
];

pub const LENGTHS: [usize; 4] = [0, 1, 7, 4099];

pub fn compressor(how: Compression, len: usize, world: &World) -> Compressor {
    Compressor::new(&Device::cpu(1), how, len, world.size())
}

/// A rank's gradient in a step: numbers from -1 to 1 times powers of two from 1 to 2^-15.
pub fn gradient(len: usize, rank: usize, step: usize) -> Vec<f32> {
    let key = RandomKey { seed: rank as u64, stream: step as u64 };
    let number = |word: u32| (word >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let at = |i: u64| number(key.word(2 * i)) * 0.5f32.powi(key.word(2 * i + 1) as i32 & 15);
    (0..len as u64).map(at).collect()
}

/// The sum over `ranks`, in f64.
pub fn whole_sum(len: usize, ranks: usize, step: usize) -> Vec<f64> {
    let all: Vec<_> = (0..ranks).map(|rank| gradient(len, rank, step)).collect();
    (0..len).map(|i| all.iter().map(|gradient| gradient[i] as f64).sum()).collect()
}

/// Reduce-scatter followed by an all-gather, to compare with an all-reduce.
pub fn scattered(world: &World, compressor: &mut Compressor, input: &[f32]) -> Vec<f32> {
    let own = shard_range(input.len(), world.size(), world.rank());
    let (mut output, mut all) = (vec![f32::NAN; own.len()], vec![f32::NAN; input.len()]);
    compressor.reduce_scatter(world, View::of(input), ViewMut::of(&mut output)).unwrap();
    world.all_gather(&output, &mut all).unwrap();
    all
}

pub fn all_reduced(world: &World, compressor: &mut Compressor, input: &[f32]) -> Vec<f32> {
    let mut buffer = input.to_vec();
    compressor.all_reduce(world, ViewMut::of(&mut buffer)).unwrap();
    buffer
}

pub type Reduce = fn(&World, &mut Compressor, &[f32]) -> Vec<f32>;
pub const WAYS: [Reduce; 2] = [all_reduced, scattered];

pub fn state(compressor: &Compressor, kind: CompressorState) -> Vec<f32> {
    let view = compressor.state(kind);
    let mut values = vec![0.0; view.len()];
    Device::cpu(1).read(view, &mut values);
    values
}

pub fn residual(compressor: &Compressor) -> Vec<f32> {
    state(compressor, CompressorState::Residual)
}

pub fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
