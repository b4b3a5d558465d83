//! Values of packed numbers after unpacking. Inputs are f32 values in f64. Halves are rounded from f32, because the half
//! crate's conversion from f64 ignores the lower bits.

use crate::Code;
use crate::device::SCALE_CHUNK as CHUNK;

/// `x` after packing and unpacking.
pub fn round_trip(code: Code, x: &[f64]) -> Vec<f64> {
    x.chunks(CHUNK).flat_map(|chunk| round_chunk(code, chunk)).collect()
}

fn round_chunk(code: Code, chunk: &[f64]) -> Vec<f64> {
    let finite = chunk.iter().all(|x| x.is_finite());
    let max = chunk.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    let each = |round: &dyn Fn(f64) -> f64| chunk.iter().map(|x| round(*x)).collect();
    match code {
        Code::Bf16 => each(&|x| half::bf16::from_f32(x as f32).to_f64()),
        _ if !finite => each(&|_| f64::NAN),
        _ if max == 0.0 => each(&|_| 0.0),
        Code::F16 => {
            let scale = 2f64.powi(max.log2().floor() as i32 - 14);
            each(&|x| half::f16::from_f32((x / scale) as f32).to_f64() * scale)
        }
        Code::Int8 => each(&|x| (x * 127.0 / max).round_ties_even() * max / 127.0),
    }
}
