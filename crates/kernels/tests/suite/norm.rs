use crate::check::*;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::norm::{self, Backward, Gradients, Params};
use lockstep_kernels::reference::norm as reference;

const EPS: f64 = 1e-5;

crate::both_types!(layer_norm_matches_the_reference rms_norm_matches_the_reference);

fn layer_norm_matches_the_reference<E: Float>() {
    for (rows, dim) in SHAPES {
        let (x, dy) = (numbers::<E>(rows * dim, 1), numbers::<E>(rows * dim, 2));
        let (gain, bias, before) =
            (numbers::<E>(dim, 3), numbers::<E>(dim, 4), numbers::<E>(rows * dim, 5));
        let out = reference::layer_forward(&to_f64(&x), &to_f64(&gain), &to_f64(&bias), EPS);
        let (dx, dgain, dbias) =
            reference::layer_backward(&to_f64(&x), &to_f64(&gain), EPS, &to_f64(&dy));
        let added: Vec<f64> = dx.iter().zip(&before).map(|(d, b)| d + b.as_f32() as f64).collect();
        let (dgain2, dbias2) =
            (dgain.iter().map(|d| d + 1.0).collect(), dbias.iter().map(|d| d + 1.0).collect());
        let what = format!("layer ({rows}, {dim})");
        // A row of one element has no variance, so its gradient is rounding error divided by √eps.
        let bound = tolerance::<E>(if dim == 1 { 1e-3 } else { 2e-5 });
        everywhere(&what, bound, [out, dx, dgain, dbias, added, dgain2, dbias2], |cpu| {
            let mut stats = vec![0.0; rows * 2];
            let (mut out, mut again) =
                (vec![E::default(); rows * dim], vec![E::default(); rows * dim]);
            let params = Params { gain: &gain, bias: Some(&bias), eps: EPS as f32 };
            norm::forward(cpu, params, &x, &mut out, Some(&mut stats));
            norm::forward(cpu, params, &x, &mut again, None);
            assert_eq!(
                to_f64(&out),
                to_f64(&again),
                "output depends on whether statistics are stored"
            );
            norm::recompute(cpu, params, &x, &stats, &mut again);
            assert_eq!(to_f64(&out), to_f64(&again), "recomputed output differs");

            let from = Backward { x: &x, gain: &gain, stats: &stats, dy: &dy };
            let (mut dx, mut dgain, mut dbias) =
                (vec![E::default(); rows * dim], vec![9.0; dim], vec![9.0; dim]);
            let (gain, bias) = (&mut dgain[..], Some(&mut dbias[..]));
            let gradients = Gradients { gain, bias, accumulate: false };
            norm::backward(cpu, &from, &mut dx, false, gradients);
            let (mut added, mut dgain2, mut dbias2) =
                (before.clone(), vec![1.0; dim], vec![1.0; dim]);
            let (gain, bias) = (&mut dgain2[..], Some(&mut dbias2[..]));
            let gradients = Gradients { gain, bias, accumulate: true };
            norm::backward(cpu, &from, &mut added, true, gradients);
            [&out, &dx]
                .map(|x| to_f64(x))
                .into_iter()
                .chain([to_f64(&dgain), to_f64(&dbias), to_f64(&added)])
                .chain([to_f64(&dgain2), to_f64(&dbias2)])
                .collect::<Vec<_>>()
                .try_into()
                .unwrap()
        });
    }
}

fn rms_norm_matches_the_reference<E: Float>() {
    for (rows, dim) in SHAPES {
        let (x, dy) = (numbers::<E>(rows * dim, 1), numbers::<E>(rows * dim, 2));
        let (gain, before) = (numbers::<E>(dim, 3), numbers::<E>(rows * dim, 5));
        let out = reference::rms_forward(&to_f64(&x), &to_f64(&gain), EPS);
        let (dx, dgain) = reference::rms_backward(&to_f64(&x), &to_f64(&gain), EPS, &to_f64(&dy));
        let added: Vec<f64> = dx.iter().zip(&before).map(|(d, b)| d + b.as_f32() as f64).collect();
        let dgain2 = dgain.iter().map(|d| d + 1.0).collect();
        let what = format!("rms ({rows}, {dim})");
        everywhere(&what, tolerance::<E>(2e-5), [out, dx, dgain, added, dgain2], |cpu| {
            let mut stats = vec![0.0; rows];
            let (mut out, mut again) =
                (vec![E::default(); rows * dim], vec![E::default(); rows * dim]);
            let params = Params { gain: &gain, bias: None, eps: EPS as f32 };
            norm::forward(cpu, params, &x, &mut out, Some(&mut stats));
            norm::recompute(cpu, params, &x, &stats, &mut again);
            assert_eq!(to_f64(&out), to_f64(&again), "recomputed output differs");

            let from = Backward { x: &x, gain: &gain, stats: &stats, dy: &dy };
            let (mut dx, mut dgain) = (vec![E::default(); rows * dim], vec![9.0; dim]);
            let gradients = Gradients { gain: &mut dgain, bias: None, accumulate: false };
            norm::backward(cpu, &from, &mut dx, false, gradients);
            let (mut added, mut dgain2) = (before.clone(), vec![1.0; dim]);
            let gradients = Gradients { gain: &mut dgain2, bias: None, accumulate: true };
            norm::backward(cpu, &from, &mut added, true, gradients);
            [to_f64(&out), to_f64(&dx), to_f64(&dgain), to_f64(&added), to_f64(&dgain2)]
        });
    }
}

#[test]
fn reference_gradient_matches_finite_differences() {
    let (rows, dim) = (3, 7);
    let random = |n, stream| to_f64(&numbers::<f32>(n, stream));
    let (x, gain, bias, dy) =
        (random(rows * dim, 1), random(dim, 2), random(dim, 3), random(rows * dim, 4));
    let (dx, dgain, dbias) = reference::layer_backward(&x, &gain, EPS, &dy);
    let layer = |x: &[f64], gain: &[f64], bias: &[f64]| {
        dot(&reference::layer_forward(x, gain, bias, EPS), &dy)
    };
    close("dx", 1e-7, &finite_differences(&x, |x| layer(x, &gain, &bias)), &dx);
    close("dgain", 1e-7, &finite_differences(&gain, |gain| layer(&x, gain, &bias)), &dgain);
    close("dbias", 1e-7, &finite_differences(&bias, |bias| layer(&x, &gain, bias)), &dbias);

    let (dx, dgain) = reference::rms_backward(&x, &gain, EPS, &dy);
    let rms = |x: &[f64], gain: &[f64]| dot(&reference::rms_forward(x, gain, EPS), &dy);
    close("dx", 1e-7, &finite_differences(&x, |x| rms(x, &gain)), &dx);
    close("dgain", 1e-7, &finite_differences(&gain, |gain| rms(&x, gain)), &dgain);
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() {
    let x: Vec<f32> = numbers::<f32>(512, 1).iter().map(|x| x + 1e4).collect();
    let (gain, bias) = (vec![1.0; 512], vec![0.0; 512]);
    let expected = reference::layer_forward(&to_f64(&x), &to_f64(&gain), &to_f64(&bias), EPS);
    everywhere("mean of 1e4", 3e-3, [expected], |cpu| {
        let mut out = vec![0.0; 512];
        let params = Params { gain: &gain, bias: Some(&bias), eps: EPS as f32 };
        norm::forward(cpu, params, &x, &mut out, None);
        [to_f64(&out)]
    });
}
