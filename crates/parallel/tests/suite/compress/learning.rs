//! A small problem that converges with error feedback and not without it.
//!
//! Two ranks minimize the squared distance of the parameters from their targets. A few elements of the gradient
//! oscillate with a large amplitude: they are always in the top k and determine the scale of their chunk, and
//! contribute nothing.

use super::*;
use lockstep_comm::on_threads;

const PARAMETERS: usize = 1000;
const STEPS: usize = 2000;
const RATE: f32 = 3e-3;
/// One in each chunk of both ranks' shards.
const OSCILLATING: [usize; 4] = [0, 300, 500, 800];

/// A rank's half of the gradient.
fn half_gradient(parameters: &[f32], targets: &[f32], step: usize) -> Vec<f32> {
    let mut slope: Vec<f32> =
        parameters.iter().zip(targets).map(|(at, target)| (at - target) / 2.0).collect();
    let swing = if step.is_multiple_of(2) { 100.0 } else { -100.0 };
    OSCILLATING.iter().for_each(|place| slope[*place] += swing);
    slope
}

/// The final distance from the targets, relative to the initial one.
fn distance_left(how: Compression, feedback: bool) -> f64 {
    let targets = gradient(PARAMETERS, 7, 0);
    let ends = on_threads(2, |world| {
        let mut compressor = compressor(how, PARAMETERS, &world);
        let mut parameters = vec![0f32; PARAMETERS];
        for step in 0..STEPS {
            let mut gradient = half_gradient(&parameters, &targets, step);
            compressor.all_reduce(&world, ViewMut::of(&mut gradient)).unwrap();
            parameters.iter_mut().zip(&gradient).for_each(|(at, slope)| *at -= RATE * slope);
            if !feedback {
                let residual = compressor.state_mut(CompressorState::Residual);
                Device::cpu(1).fill(residual, 0.0);
            }
        }
        parameters
    });
    assert_eq!(bits(&ends[0]), bits(&ends[1]), "{how}: ranks hold different parameters");
    // The end of the oscillating elements is arbitrary.
    let places = (0..PARAMETERS).filter(|i| !OSCILLATING.contains(i));
    let far = |at: &dyn Fn(usize) -> f64| -> f64 {
        places.clone().map(|i| (at(i) - targets[i] as f64).powi(2)).sum::<f64>().sqrt()
    };
    far(&|i| ends[0][i] as f64) / far(&|_| 0.0)
}

#[test]
fn error_feedback_makes_it_converge() {
    for how in [Compression::Int8, Compression::TopK(0.01)] {
        let (with, without) = (distance_left(how, true), distance_left(how, false));
        println!("{how}: {with} of the distance is left, {without} without feedback");
        assert!(with < 0.05, "{how}: {with} of the distance is left");
        assert!(without > 0.5, "{how}: {without} of the distance is left without feedback");
    }
}

#[test]
fn two_bytes_converge_like_f32() {
    let whole = distance_left(Compression::None, true);
    for how in [Compression::Bf16, Compression::F16] {
        let left = distance_left(how, true);
        assert!(
            (left - whole).abs() < 0.02,
            "{how}: {left} of the distance is left, {whole} uncompressed"
        );
    }
}
