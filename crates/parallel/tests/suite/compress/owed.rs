//! Many steps: what was applied and what is still owed are together the whole gradient, and the debt does not grow.

use super::*;
use lockstep_comm::on_threads;

const STEPS: usize = 20;

/// After `STEPS` steps: (everything that was applied, everything that all ranks still owe).
fn applied_and_owed(
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
        (applied, compressor.error().to_vec())
    });
    let owed =
        |i: usize| ends.iter().map(|(_, error)| error.get(i).map_or(0.0, |e| *e as f64)).sum();
    (ends[0].0.clone(), (0..len).map(owed).collect())
}

#[test]
fn what_is_applied_and_what_is_owed_are_the_whole() {
    for (how, ranks) in LOSSY.into_iter().flat_map(|how| (1..=5).map(move |ranks| (how, ranks))) {
        for (len, reduce) in LENGTHS.into_iter().flat_map(|len| WAYS.map(|way| (len, way))) {
            let (applied, owed) = applied_and_owed(how, len, ranks, reduce);
            let mut whole = vec![0f64; len];
            for step in 0..STEPS {
                let sum = whole_sum(len, ranks, step);
                whole.iter_mut().zip(sum).for_each(|(whole, sum)| *whole += sum);
            }
            for i in 0..len {
                let (got, right) = (applied[i] + owed[i], whole[i]);
                // Sums of numbers up to `ranks` that each step rounds in f32, as any sum of them is.
                let rounding = (STEPS * ranks) as f64 * 2f64.powi(-24) * 2.0;
                let at = format!("{how} of {len} on {ranks}, element {i}");
                assert!((got - right).abs() <= rounding, "{at}: {got}, not {right}");
                // One step's: each rank half a step of what it rounds, and an owner half a step of the sum.
                let debt = match how {
                    Compression::Bf16 => 2.1 * ranks as f64 * 2f64.powi(-9),
                    Compression::F16 => 2.1 * ranks as f64 * 2f64.powi(-12),
                    Compression::Int8 => 2.1 * ranks as f64 / 254.0,
                    _ => f64::INFINITY,
                };
                assert!(owed[i].abs() <= debt, "{at}: {} is owed", owed[i]);
            }
        }
    }
}

/// A run that is stopped, with its error saved and loaded, goes on with the same bits.
#[test]
fn an_error_that_is_loaded_goes_on_where_it_was() {
    for (how, reduce) in LOSSY.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
        on_threads(3, |world| {
            let step = |compressor: &mut Compressor, step| {
                bits(&reduce(&world, compressor, &gradient(4099, world.rank(), step)))
            };
            let mut whole = compressor(how, 4099, &world);
            step(&mut whole, 0);
            let mut resumed = compressor(how, 4099, &world);
            for what in [Memory::Owed, Memory::Usual] {
                resumed.remembered_mut(what).copy_from_slice(whole.remembered(what));
            }
            assert_eq!(step(&mut whole, 1), step(&mut resumed, 1), "{how}");
        });
    }
}
