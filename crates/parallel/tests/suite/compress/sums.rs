//! One step: the result, and that it is equal on all ranks.

use super::*;
use lockstep_comm::on_threads;
use lockstep_kernels::Tag;
use lockstep_kernels::reference::top_k;

/// Maximum error of a sum of `ranks` numbers, each at most 1, after at most two roundings.
fn tolerance(how: Compression, ranks: usize) -> f64 {
    let half_step = match how {
        Compression::Bf16 => 2f64.powi(-9),
        Compression::F16 => 2f64.powi(-12),
        Compression::Int8 => 1.0 / 254.0,
        _ => 0.0,
    };
    // Half a unit per number, and half a unit of the sum.
    2.0 * ranks as f64 * half_step + ranks as f64 * 1e-7
}

#[test]
fn all_ranks_get_the_same_bits_close_to_the_sum() {
    let quantized = LOSSY.into_iter().filter(|how| *how != Compression::TopK(0.01));
    for (how, ranks) in quantized.flat_map(|how| (1..=5).map(move |ranks| (how, ranks))) {
        for (len, reduce) in LENGTHS.into_iter().flat_map(|len| WAYS.map(|way| (len, way))) {
            let sums = on_threads(ranks, |world| {
                let mut compressor = compressor(how, len, &world);
                reduce(&world, &mut compressor, &gradient(len, world.rank(), 0))
            });
            let at = format!("{how} of {len} on {ranks}");
            assert!(sums.iter().all(|sum| bits(sum) == bits(&sums[0])), "{at}");
            for (got, right) in sums[0].iter().zip(whole_sum(len, ranks, 0)) {
                let off = (*got as f64 - right).abs();
                assert!(off <= tolerance(how, ranks), "{at}: {got}, not {right}");
            }
        }
    }
}

#[test]
fn only_the_top_k_of_every_rank_are_summed() {
    for (ranks, len) in (2..=5).flat_map(|ranks| LENGTHS.map(|len| (ranks, len))) {
        let k = (len as f64 * 0.01).ceil() as usize;
        let mut expected = vec![0f32; len];
        for rank in 0..ranks {
            let gradient = gradient(len, rank, 0);
            let in_f64: Vec<f64> = gradient.iter().map(|x| *x as f64).collect();
            let places = top_k::indices(&in_f64, k);
            places.iter().for_each(|place| expected[*place] += gradient[*place]);
        }
        for reduce in WAYS {
            let sums = on_threads(ranks, |world| {
                let mut compressor = compressor(Compression::TopK(0.01), len, &world);
                reduce(&world, &mut compressor, &gradient(len, world.rank(), 0))
            });
            let same = sums.iter().all(|sum| bits(sum) == bits(&expected));
            assert!(same, "{len} on {ranks}");
        }
    }
}

#[test]
fn one_rank_keeps_its_gradient() {
    on_threads(1, |world| {
        for (how, reduce) in LOSSY.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
            let mut compressor = compressor(how, 7, &world);
            let mut gradient = gradient(7, 0, 0);
            (gradient[1], gradient[2]) = (-0.0, f32::NAN);
            let sum = reduce(&world, &mut compressor, &gradient);
            assert_eq!(bits(&sum), bits(&gradient), "{how}");
            assert!(residual(&compressor).is_empty());
        }
    });
}

#[test]
fn nan_and_infinity_reach_all_ranks_and_leave_no_residual() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (how, reduce) in LOSSY.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
            for place in [0, 500, 998] {
                on_threads(3, |world| {
                    let mut compressor = compressor(how, 999, &world);
                    let mut gradient = gradient(999, world.rank(), 0);
                    if world.rank() == 1 {
                        gradient[place] = bad;
                    }
                    let sum = reduce(&world, &mut compressor, &gradient);
                    let at = format!("{how} at {place}");
                    assert!(!sum[place].is_finite(), "{at}: {bad} became {}", sum[place]);
                    let residual = residual(&compressor);
                    assert!(residual.iter().all(|x| x.is_finite()), "{at}: {bad} in the residual");
                    gradient[place] = 0.0;
                    let sum = reduce(&world, &mut compressor, &gradient);
                    assert!(sum.iter().all(|x| x.is_finite()), "{at}: {bad} appears again");
                });
            }
        }
    }
}

#[test]
fn between_steps_only_the_state_is_allocated() {
    for (how, reduce) in LOSSY.into_iter().flat_map(|how| WAYS.map(|way| (how, way))) {
        on_threads(2, |world| {
            let device = Device::cpu(2);
            let mut compressor = Compressor::new(&device, how, 4099, 2);
            let mut reserved = None;
            for step in 0..3 {
                reduce(&world, &mut compressor, &gradient(4099, world.rank(), step));
                let memory = device.memory();
                let each = if matches!(how, Compression::TopK(_)) { 8 } else { 4 };
                assert_eq!(memory.of(Tag::Buffers).now, 4099 * each, "{how}");
                assert_eq!(*reserved.get_or_insert(memory.reserved), memory.reserved, "{how}");
            }
        });
    }
}
