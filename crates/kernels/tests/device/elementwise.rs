use half::bf16;
use lockstep_kernels::{Element, Float};

use crate::check::*;

crate::both_types!(elements_match_the_reference casts_round_to_nearest columns_match_the_reference);

fn elements_match_the_reference<E: Float>() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| OFFSETS.map(|offset| (n, offset))) {
        let (a, b) = (numbers::<E>(n, 1), numbers::<E>(n, 2));
        let sum = to_f64(&a).iter().zip(to_f64(&b)).map(|(a, b)| a + b).collect();
        let expected = [sum, to_f64(&a), vec![1.5; n]];
        check(&format!("elements, {n} from {offset}"), tolerance::<E>(1e-6), expected, || {
            let [mut added, mut copied, mut filled] = [(); 3].map(|_| Data::row(offset, &a));
            let b = Data::row(offset, &b);
            device().add(added.view_mut(), b.view());
            device().copy(b.view(), copied.view_mut());
            device().copy(Data::row(0, &a).view(), copied.view_mut());
            device().fill(filled.view_mut(), 1.5);
            [added, copied, filled].map(|x| x.read_f64::<E>())
        });
    }
}

#[test]
fn integers_are_filled_and_copied() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| OFFSETS.map(|offset| (n, offset))) {
        let mut x = Data::row(offset, &vec![7u32; n]);
        device().fill(x.view_mut(), 3.0);
        assert_eq!(x.read::<u32>(), vec![3; n]);
        let from = integers(n, 1 << 30, 1);
        device().copy(Data::row(0, &from).view(), x.view_mut());
        assert_eq!(x.read::<u32>(), from);
    }
}

/// Casts to bf16 round like the half crate; casts to f32 are exact.
fn casts_round_to_nearest<E: Float>() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| OFFSETS.map(|offset| (n, offset))) {
        let x = numbers::<E>(n, 3);
        let rounded: Vec<f64> = x.iter().map(|x| bf16::from_f32(x.as_f32()).to_f64()).collect();
        check(&format!("casts of {n} from {offset}"), 0.0, [rounded, to_f64(&x)], || {
            let from = Data::row(offset, &x);
            let mut rounded = Data::row(0, &vec![bf16::ZERO; n]);
            let mut whole = Data::row(offset, &vec![0f32; n]);
            device().cast(from.view(), rounded.view_mut());
            device().cast(from.view(), whole.view_mut());
            [rounded.read_f64::<bf16>(), whole.read_f64::<f32>()]
        });
    }
}

/// Copies and adds columns into a wider matrix of each dtype, whose other columns stay unchanged.
fn columns_match_the_reference<E: Float>() {
    columns_between::<E, f32>();
    columns_between::<E, bf16>();
}

fn columns_between<A: Float, B: Float>() {
    for (rows, stride) in [(0, 8), (1, 7), (17, 40), (700, 33), (300, 64)] {
        let wider = stride + 8;
        let (from, to) = (numbers::<A>(rows * stride, 1), numbers::<B>(rows * wider, 2));
        for (first, at, width) in
            [(0, 0, stride), (3, 9, stride - 5), (stride - 1, 2, 1), (0, 8, stride)]
        {
            let expected = [false, true].map(|added| {
                let mut expected = to_f64(&to);
                for (row, from) in expected.chunks_mut(wider).zip(from.chunks(stride)) {
                    for i in 0..width {
                        let old = if added { row[at + i] } else { 0.0 };
                        row[at + i] = old + f64::from(from[first + i].as_f32());
                    }
                }
                expected
            });
            let what = format!("{width} columns of {rows}, {} to {}", A::DTYPE, B::DTYPE);
            check(&what, tolerance::<B>(1e-6), expected, || {
                let from = Data::new(0, (rows, stride), &from);
                let [mut placed, mut added] = [(); 2].map(|_| Data::new(0, (rows, wider), &to));
                device().place_columns(from.view(), first..first + width, placed.view_mut(), at);
                device().add_columns(from.view(), first..first + width, added.view_mut(), at);
                [placed, added].map(|x| x.read_f64::<B>())
            });
        }
    }
}

#[test]
fn columns_are_copied_to_a_narrower_matrix() {
    let (rows, stride, first, width) = (37, 24, 5, 11);
    let from = numbers::<f32>(rows * stride, 1);
    let mut to = Data::new(0, (rows, width), &vec![0f32; rows * width]);
    device().copy_columns(Data::new(0, (rows, stride), &from).view(), first, to.view_mut());
    let expected: Vec<f32> =
        from.chunks(stride).flat_map(|row| row[first..first + width].to_vec()).collect();
    assert_eq!(to.read::<f32>(), expected);
    assert_eq!(<f32 as Element>::DTYPE, to.view().dtype());
}
