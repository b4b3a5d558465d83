//! Attention against the reference: head sizes, groups, lengths, positions and dtypes, each computed twice.

mod blocks;
mod sequences;

use half::bf16;
use lockstep_kernels::reference::attention as reference;
use lockstep_kernels::{
    AttentionDelta, AttentionOutput, AttentionShape, Device, Dtype, Float, Tag, Tensor,
};

fn device() -> Device {
    Device::from_env(2)
}

/// Distance to the reference: rounding of sums in f32, and of probabilities and results in bf16.
fn tolerance(dtype: Dtype) -> f64 {
    if dtype == Dtype::F32 { 2e-5 } else { 2e-2 }
}

fn shape_of(
    [heads, kv_heads, head_dim, q_len, k_len, q_start, k_start]: [usize; 7],
) -> AttentionShape {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let batch = 2;
    AttentionShape { batch, heads, kv_heads, head_dim, q_len, k_len, q_start, k_start, scale }
}

/// Pseudo-random numbers in -size..size, the same in every run.
fn numbers<E: Float>(len: usize, seed: u64, size: f32) -> Vec<E> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        E::round_from(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size)
    };
    (0..len).map(next).collect()
}

/// A tensor with these elements.
fn tensor<E: Float>(device: &Device, rows: usize, values: &[E]) -> Tensor {
    let mut tensor = device.empty(rows, values.len() / rows, E::DTYPE, Tag::Activations);
    device.write(tensor.view_mut(), values);
    tensor
}

/// A tensor whose contents must not matter.
fn garbage(device: &Device, rows: usize, cols: usize, dtype: Dtype) -> Tensor {
    let mut tensor = device.empty(rows, cols, dtype, Tag::Activations);
    device.fill(tensor.view_mut(), f32::NAN);
    tensor
}

fn read<E: Float>(device: &Device, tensor: &Tensor) -> Vec<f64> {
    let mut values = vec![E::round_from(0.0); tensor.len()];
    device.read(tensor.view(), &mut values);
    values.iter().map(|x| f64::from(x.as_f32())).collect()
}

/// f32 or `E`, whichever the tensor holds.
fn read_any<E: Float>(device: &Device, tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        Dtype::F32 => read::<f32>(device, tensor),
        _ => read::<E>(device, tensor),
    }
}

fn columns(values: &[f64], stride: usize, from: usize, width: usize) -> Vec<f64> {
    values.chunks(stride).flat_map(|row| row[from..from + width].to_vec()).collect()
}

fn to_f64<E: Float>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| f64::from(x.as_f32())).collect()
}

/// Compares relative to the largest number, or to one if all are smaller: zeros are the result of the rounding of
/// sums of numbers of about one.
fn assert_near(ours: &[f64], theirs: &[f64], tolerance: f64, what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let size = theirs.iter().filter(|x| x.is_finite()).fold(1f64, |a, x| a.max(x.abs()));
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let apart = if a == b { 0.0 } else { (a - b).abs() / size };
        assert!(apart <= tolerance, "{what}: element {i} is {a}, not {b}: differs by {apart:.1e}");
    }
}

/// Bits of results, to compare two runs. All NaN count as the same.
fn assert_same_bits(first: &[Vec<f64>], second: &[Vec<f64>], what: &str) {
    for (i, (a, b)) in first.iter().zip(second).enumerate() {
        let same =
            a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan());
        assert!(same, "{what}: result {i} differs between two runs");
    }
}
