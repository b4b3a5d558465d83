//! Many steps: the applied gradients and the residuals add up to the sum of all gradients, and residuals stay bounded.

use super::*;
use lockstep_comm::on_threads;

const STEPS: usize = 20;

/// After `STEPS` steps: (sum of the applied gradients, sum of the residuals of all ranks).
fn applied_and_residual(
    how: Compression,
    len: usize,
    ranks: usize,
    reduce: Reduce,
) -> (Vec<f64>, Vec<f64>) {
    let ends = on_threads(ranks, |world| {
        let mut compressor = compressor(how, len, &world);
        let mut applied = vec![0f64; len];
        for step in 0..STEPS {
            let sum = reduce(&world, &mut compressor, &gradient(len, world.rank(), step));
            applied.iter_mut().zip(&sum).for_each(|(applied, sum)| *applied += *sum as f64);
        }
        (applied, residual(&compressor))
    });
    let total = |i: usize| {
        ends.iter().map(|(_, residual)| residual.get(i).map_or(0.0, |r| *r as f64)).sum()
    };
    (ends[0].0.clone(), (0..len).map(total).collect())
}

#[test]
fn applied_gradients_and_residuals_add_up() {
    for (how, ranks) in LOSSY.into_iter().flat_map(|how| (1..=5).map(move |ranks| (how, ranks))) {
        for (len, reduce) in LENGTHS.into_iter().flat_map(|len| WAYS.map(|way| (len, way))) {
            let (applied, residual) = applied_and_residual(how, len, ranks, reduce);
            let mut whole = vec![0f64; len];
            for step in 0..STEPS {
                let sum = whole_sum(len, ranks, step);
                whole.iter_mut().zip(sum).for_each(|(whole, sum)| *whole += sum);
            }
            for i in 0..len {
                let (got, right) = (applied[i] + residual[i], whole[i]);
                // Each step sums numbers up to `ranks` in f32.
                let rounding = (STEPS * ranks) as f64 * 2f64.powi(-24) * 2.0;
                let at = format!("{how} of {len} on {ranks}, element {i}");
                assert!((got - right).abs() <= rounding, "{at}: {got}, not {right}");
                // The errors of one step: half a unit per rank, and half a unit of the sum at its owner.
                let bound = match how {
                    Compression::Bf16 => 2.1 * ranks as f64 * 2f64.powi(-9),
                    Compression::F16 => 2.1 * ranks as f64 * 2f64.powi(-12),
                    Compression::Int8 => 2.1 * ranks as f64 / 254.0,
                    _ => f64::INFINITY,
                };
                assert!(residual[i].abs() <= bound, "{at}: residual {}", residual[i]);
            }
        }
    }
}

#[test]
fn a_loaded_state_continues_with_the_same_bits() {
    for (how, reduce) in LOSSY.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
        on_threads(3, |world| {
            let step = |compressor: &mut Compressor, step| {
                bits(&reduce(&world, compressor, &gradient(4099, world.rank(), step)))
            };
            let mut whole = compressor(how, 4099, &world);
            step(&mut whole, 0);
            let mut resumed = compressor(how, 4099, &world);
            for kind in [CompressorState::Residual, CompressorState::MeanSquares] {
                Device::cpu(1).write(resumed.state_mut(kind), &state(&whole, kind));
            }
            assert_eq!(step(&mut whole, 1), step(&mut resumed, 1), "{how}");
        });
    }
}
