use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::swiglu;
use lockstep_kernels::reference::swiglu as reference;

crate::both_types!(matches_the_reference);

fn matches_the_reference<E: Float>() {
    for (rows, f) in SHAPES {
        let (x, dy) = (numbers::<E>(rows * 2 * f, 1), numbers::<E>(rows * f, 2));
        let out = reference::forward(&to_f64(&x), f);
        let dx = reference::backward(&to_f64(&x), f, &to_f64(&dy));
        everywhere(&format!("swiglu ({rows}, {f})"), tolerance::<E>(2e-6), [out, dx], |cpu| {
            let (mut out, mut dx) =
                (vec![E::default(); rows * f], vec![E::default(); rows * 2 * f]);
            swiglu::forward(cpu, &x, f, &mut out);
            swiglu::backward(cpu, &x, f, &dy, &mut dx);
            [to_f64(&out), to_f64(&dx)]
        });
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let (x, dy) = (to_f64(&numbers::<f32>(4 * 10, 1)), to_f64(&numbers::<f32>(4 * 5, 2)));
    let expected = finite_differences(&x, |x| dot(&reference::forward(x, 5), &dy));
    close("d_gate_up", 1e-8, &expected, &reference::backward(&x, 5, &dy));
}
