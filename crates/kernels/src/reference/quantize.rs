//! What packed numbers are worth to their receiver. The numbers are f32's, in f64: halves are rounded from f32, as
//! the half crate's way from f64 looks at its upper bits only.

use crate::Code;
use crate::device::SCALE_CHUNK as CHUNK;

/// `x` after packing and unpacking.
pub fn round_trip(code: Code, x: &[f64]) -> Vec<f64> {
    x.chunks(CHUNK).flat_map(|chunk| round_chunk(code, chunk)).collect()
}

fn round_chunk(code: Code, chunk: &[f64]) -> Vec<f64> {
    let whole = chunk.iter().all(|x| x.is_finite());
    let most = chunk.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let each = |round: &dyn Fn(f64) -> f64| chunk.iter().map(|x| round(*x)).collect();
    match code {
        Code::Bf16 => each(&|x| half::bf16::from_f32(x as f32).to_f64()),
        _ if !whole => each(&|_| f64::NAN),
        _ if most == 0.0 => each(&|_| 0.0),
        Code::F16 => {
            let scale = 2f64.powi(most.log2().floor() as i32 - 14);
            each(&|x| half::f16::from_f32((x / scale) as f32).to_f64() * scale)
        }
        Code::Int8 => each(&|x| (x * 127.0 / most).round_ties_even() * most / 127.0),
    }
}
