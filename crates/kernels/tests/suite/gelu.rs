use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::{Cpu, gelu};
use lockstep_kernels::reference::gelu as reference;

crate::both_types!(matches_the_reference);

fn matches_the_reference<E: Float>() {
    for n in LENGTHS {
        // Scaled so that the tails are the identity and zero.
        let x: Vec<E> =
            numbers::<E>(n, 1).iter().map(|x| E::round_from(x.as_f32() * 3.0)).collect();
        let dy = numbers::<E>(n, 2);
        let out: Vec<f64> = to_f64(&x).into_iter().map(reference::forward).collect();
        let dx: Vec<f64> = to_f64(&x)
            .into_iter()
            .zip(to_f64(&dy))
            .map(|(x, dy)| dy * reference::slope(x))
            .collect();
        everywhere(&format!("gelu of {n}"), tolerance::<E>(2e-6), [out, dx], |cpu| {
            let (mut out, mut d) = (vec![E::default(); n], dy.clone());
            gelu::forward(cpu, &x, &mut out);
            gelu::backward_in_place(cpu, &x, &mut d);
            [to_f64(&out), to_f64(&d)]
        });
    }
}

#[test]
fn reference_derivative_matches_finite_differences() {
    let x = to_f64(&numbers::<f32>(50, 1));
    let expected = finite_differences(&x, |x| x.iter().map(|x| reference::forward(*x)).sum());
    close("slope", 1e-8, &expected, &x.iter().map(|x| reference::slope(*x)).collect::<Vec<_>>());
}

#[test]
fn huge_inputs_have_derivatives_zero_and_one() {
    let x = [1e30f32, -1e30, f32::MAX, f32::MIN, 50.0, -50.0];
    let mut d = [1.0; 6];
    gelu::backward_in_place(&Cpu::new(1), &x, &mut d);
    assert_eq!(d, [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
}
