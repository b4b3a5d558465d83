//! A small problem that is solved with the errors and not without them.
//!
//! Two ranks want the parameters near their targets, and the loss is the square of the distance. In a few places a
//! gradient swings, up in one step and down in the next: these are always its largest elements, and the whole scale
//! of their chunk, and there is nothing to be gained from them.

use super::*;
use lockstep_comm::on_threads;

const PARAMETERS: usize = 1000;
const STEPS: usize = 2000;
const RATE: f32 = 3e-3;
/// One in each chunk of both ranks' shares.
const SWINGING: [usize; 4] = [0, 300, 500, 800];

/// A rank's half of the gradient.
fn slope(parameters: &[f32], targets: &[f32], step: usize) -> Vec<f32> {
    let mut slope: Vec<f32> =
        parameters.iter().zip(targets).map(|(at, target)| (at - target) / 2.0).collect();
    let swing = if step.is_multiple_of(2) { 100.0 } else { -100.0 };
    SWINGING.iter().for_each(|place| slope[*place] += swing);
    slope
}

/// How far the parameters end from the best, beside how far they began.
fn distance_left(how: Compression, feedback: bool) -> f64 {
    let targets = gradient(PARAMETERS, 7, 0);
    let ends = on_threads(2, |world| {
        let mut compressor = compressor(how, PARAMETERS, &world);
        let mut parameters = vec![0f32; PARAMETERS];
        for step in 0..STEPS {
            let mut gradient = slope(&parameters, &targets, step);
            compressor.all_reduce(&world, &mut gradient).unwrap();
            parameters.iter_mut().zip(&gradient).for_each(|(at, slope)| *at -= RATE * slope);
            if !feedback {
                compressor.remembered_mut(Memory::Owed).fill(0.0);
            }
        }
        parameters
    });
    assert_eq!(bits(&ends[0]), bits(&ends[1]), "{how}: all ranks hold the same parameters");
    // Where it swings, the end is a matter of chance.
    let places = (0..PARAMETERS).filter(|i| !SWINGING.contains(i));
    let far = |at: &dyn Fn(usize) -> f64| -> f64 {
        places.clone().map(|i| (at(i) - targets[i] as f64).powi(2)).sum::<f64>().sqrt()
    };
    far(&|i| ends[0][i] as f64) / far(&|_| 0.0)
}

#[test]
fn it_is_the_errors_that_make_it_learn() {
    for how in [Compression::Int8, Compression::TopK(0.01)] {
        let (with, without) = (distance_left(how, true), distance_left(how, false));
        println!("{how}: {with} of the way is left, {without} without errors");
        assert!(with < 0.05, "{how}: {with} of the way is left");
        assert!(without > 0.5, "{how}: {without} of the way is left without errors");
    }
}

/// As exact as the plain sum, where every step rounds a little.
#[test]
fn halves_learn_as_well_as_the_whole() {
    let whole = distance_left(Compression::None, true);
    for how in [Compression::Bf16, Compression::F16] {
        let left = distance_left(how, true);
        assert!((left - whole).abs() < 0.02, "{how}: {left} of the way is left, plainly {whole}");
    }
}
