use lockstep_kernels::{Dtype, Matmul, Tag};

use crate::check::*;

/// A GPU records operations that repeat and replays the record. They must read the values of the moment, also when one
/// operation of a sequence has other arguments than before.
#[test]
fn repeated_operations_use_the_present_values() {
    const N: usize = 8;
    let device = device();
    let mut matrices = [(); 3].map(|_| device.zeros(N, N, Dtype::F32, Tag::Activations));
    for round in 0..12usize {
        let [x, twice, out] = &mut matrices;
        let values: Vec<f32> = (0..N * N).map(|i| ((i + round) % 7) as f32).collect();
        device.write(x.view_mut(), &values);
        // As many operations as several recorded lists have; every fourth round fills with another number.
        let start = if round % 4 == 3 { 2.0 } else { 0.0 };
        device.fill(twice.view_mut(), start);
        for _ in 0..50 {
            device.add(twice.view_mut(), x.view());
        }
        device.matmul(Matmul::linear(x.view(), twice.view(), out.view_mut()));
        let sum = |i: usize| start + 50.0 * values[i];
        let expected: Vec<f32> = (0..N * N)
            .map(|i| (0..N).map(|k| values[i / N * N + k] * sum(i % N * N + k)).sum())
            .collect();
        assert_eq!(device.to_vec::<f32>(out.view()), expected, "round {round}");
    }
}
