use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::{Cpu, reduce};
use lockstep_kernels::reference::reduce as reference;

crate::both_types!(reductions_match_the_reference column_sums_match_the_reference);

fn reductions_match_the_reference<E: Float>() {
    for n in LENGTHS.into_iter().chain([100_003]) {
        let x = numbers::<E>(n, 1);
        let mut broken = x.clone();
        broken.iter_mut().skip(3).step_by(100).for_each(|x| *x = E::round_from(f32::NAN));
        broken.iter_mut().skip(8).step_by(1000).for_each(|x| *x = E::round_from(f32::NEG_INFINITY));
        let expected = vec![
            reference::sum_of_squares(&to_f64(&x)),
            0.0,
            reference::count_non_finite(&to_f64(&broken)) as f64,
        ];
        everywhere(&format!("reductions of {n}"), 1e-6, [expected], |cpu| {
            let [none, some] = [&x, &broken].map(|x| reduce::count_non_finite(cpu, x) as f64);
            [vec![reduce::sum_of_squares(cpu, &x), none, some]]
        });
    }
}

fn column_sums_match_the_reference<E: Float>() {
    for (rows, n) in SHAPES {
        let x = numbers::<E>(rows * n, 1);
        let expected = reference::column_sums(&to_f64(&x), n);
        let added = expected.iter().map(|sum| sum + 1.0).collect();
        everywhere(&format!("columns ({rows}, {n})"), 1e-5, [expected, added], |cpu| {
            let (mut sums, mut added) = (vec![1.0; n], vec![1.0; n]);
            reduce::column_sums(cpu, &x, &mut sums, false);
            reduce::column_sums(cpu, &x, &mut added, true);
            [to_f64(&sums), to_f64(&added)]
        });
    }
}

#[test]
fn long_sums_do_not_stagnate() {
    // In f32 this sum would stop growing at 2^24.
    let x = vec![1.0f32; 20_000_000];
    assert_eq!(reduce::sum_of_squares(&Cpu::new(2), &x), 2e7);
}
