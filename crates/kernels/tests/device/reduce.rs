use lockstep_kernels::reference::reduce as reference;
use lockstep_kernels::{Device, Float, Tag};

use crate::check::*;

crate::both_types!(reductions_match_the_reference column_sums_match_the_reference);

fn reductions_match_the_reference<E: Float>() {
    for (n, offset) in
        LENGTHS.into_iter().chain([5_000_011]).flat_map(|n| OFFSETS.map(|offset| (n, offset)))
    {
        let x = numbers::<E>(n, 1);
        let mut broken = x.clone();
        broken.iter_mut().skip(3).step_by(100).for_each(|x| *x = E::round_from(f32::NAN));
        broken.iter_mut().skip(8).step_by(1000).for_each(|x| *x = E::round_from(f32::NEG_INFINITY));
        let squares = reference::sum_of_squares(&to_f64(&x));
        let bad = reference::count_non_finite(&to_f64(&broken)) as f64;
        let expected = [vec![squares, 3.0 * squares, 0.0, bad]];
        check(&format!("reductions of {n} from {offset}"), 1e-6, expected, || {
            let (x, broken) = (Data::row(offset, &x), Data::row(offset, &broken));
            let squares = [
                device().sum_of_squares([x.view()]),
                device().sum_of_squares([x.view(), x.view(), x.view()]),
            ];
            let bad = [&x, &broken].map(|x| device().count_non_finite(x.view()) as f64);
            [vec![squares[0].get(), squares[1].get(), bad[0], bad[1]]]
        });
    }
}

#[test]
fn sums_match_the_reference() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| OFFSETS.map(|offset| (n, offset))) {
        let x = numbers::<f32>(n, 1);
        let expected = to_f64(&x).iter().sum::<f64>();
        check(&format!("sum of {n} from {offset}"), 1e-12, [vec![expected]], || {
            [vec![device().sum(Data::row(offset, &x).view()).get()]]
        });
    }
}

#[test]
fn the_sum_of_squares_of_nothing_is_zero() {
    assert_eq!(device().sum_of_squares([]).get(), 0.0);
}

fn column_sums_match_the_reference<E: Float>() {
    for ((rows, n), offset) in SHAPES
        .into_iter()
        .chain([(5000, 96), (20_000, 3)])
        .flat_map(|shape| OFFSETS.map(|offset| (shape, offset)))
    {
        let (x, before) = (numbers::<E>(rows * n, 1), numbers::<f32>(n, 2));
        let sums = reference::column_sums(&to_f64(&x), n);
        let added = sums.iter().zip(&before).map(|(sum, before)| sum + *before as f64).collect();
        check(&format!("column sums ({rows}, {n}) from {offset}"), 3e-5, [sums, added], || {
            let x = Data::new(offset, (rows, n), &x);
            let (mut sums, mut added) = (Data::row(0, &vec![9f32; n]), Data::row(0, &before));
            device().column_sums(x.view(), sums.view_mut(), false);
            device().column_sums(x.view(), added.view_mut(), true);
            [sums, added].map(|x| x.read_f64::<f32>())
        });
    }
}

crate::both_types!(checksums_are_those_of_the_cpu);

fn checksums_are_those_of_the_cpu<E: Float>() {
    let cpu = Device::cpu(1);
    for (n, offset) in
        LENGTHS.into_iter().chain([5_000_011]).flat_map(|n| OFFSETS.map(|offset| (n, offset)))
    {
        let mut x = numbers::<E>(n, 1);
        let both = |x: &[E]| {
            let mut there = cpu.zeros(1, n, E::DTYPE, Tag::Buffers);
            there.view_mut().host().copy_from_slice(x);
            [device().checksum(Data::row(offset, x).view()), cpu.checksum(there.view())]
        };
        let [before, expected] = both(&x);
        assert_eq!(before, expected, "{n} elements from {offset}");
        if let Some(last) = x.last_mut() {
            *last = E::round_from(last.as_f32() + 1.0);
            let [changed, expected] = both(&x);
            assert_eq!(changed, expected, "{n} elements from {offset}, one of them changed");
            assert_ne!(changed, before, "{n} elements from {offset}");
        }
    }
}
