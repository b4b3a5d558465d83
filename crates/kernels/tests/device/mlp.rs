use lockstep_kernels::Float;
use lockstep_kernels::reference::{gelu, swiglu};

use crate::check::*;

crate::both_types!(gelu_matches_the_reference swiglu_matches_the_reference);

fn gelu_matches_the_reference<E: Float>() {
    for (n, offset) in LENGTHS.into_iter().flat_map(|n| OFFSETS.map(|offset| (n, offset))) {
        // Scaled so that the tails are the identity and zero.
        let x: Vec<E> =
            numbers::<E>(n, 1).iter().map(|x| E::round_from(x.as_f32() * 3.0)).collect();
        let dy = numbers::<E>(n, 2);
        let out = to_f64(&x).into_iter().map(gelu::forward).collect();
        let slopes = to_f64(&x).into_iter().map(gelu::slope);
        let dx = slopes.zip(to_f64(&dy)).map(|(slope, dy)| dy * slope).collect();
        check(&format!("gelu of {n} from {offset}"), tolerance::<E>(2e-6), [out, dx], || {
            let (x, mut d) = (Data::row(offset, &x), Data::row(offset, &dy));
            let mut out = Data::row(offset, &dy);
            device().gelu(x.view(), out.view_mut());
            device().gelu_backward(x.view(), d.view_mut());
            [out, d].map(|x| x.read_f64::<E>())
        });
    }
}

#[test]
fn gelu_of_huge_inputs_has_derivatives_zero_and_one() {
    let x = [1e30f32, -1e30, f32::MAX, f32::MIN, 50.0, -50.0];
    let mut d = Data::row(0, &[1f32; 6]);
    device().gelu_backward(Data::row(0, &x).view(), d.view_mut());
    assert_eq!(d.read::<f32>(), [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
}

fn swiglu_matches_the_reference<E: Float>() {
    for ((rows, f), offset) in
        SHAPES.into_iter().flat_map(|shape| OFFSETS.map(|offset| (shape, offset)))
    {
        let (x, dy) = (numbers::<E>(rows * 2 * f, 1), numbers::<E>(rows * f, 2));
        let out = swiglu::forward(&to_f64(&x), f);
        let dx = swiglu::backward(&to_f64(&x), f, &to_f64(&dy));
        let what = format!("swiglu ({rows}, {f}) from {offset}");
        check(&what, tolerance::<E>(2e-6), [out, dx], || {
            let (gate_up, dy) =
                (Data::new(offset, (rows, 2 * f), &x), Data::new(offset, (rows, f), &dy));
            let mut out = Data::new(offset, (rows, f), &vec![E::default(); rows * f]);
            let mut dx = Data::new(offset, (rows, 2 * f), &x);
            device().swiglu(gate_up.view(), out.view_mut());
            device().swiglu_backward(gate_up.view(), dy.view(), dx.view_mut());
            [out, dx].map(|x| x.read_f64::<E>())
        });
    }
}
