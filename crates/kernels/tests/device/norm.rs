use lockstep_kernels::reference::norm as reference;
use lockstep_kernels::{Float, NormGradients, NormParams};

use crate::check::*;

const EPS: f64 = 1e-5;

crate::both_types!(layer_norm_matches_the_reference rms_norm_matches_the_reference);

fn layer_norm_matches_the_reference<E: Float>() {
    compare::<E>(true);
}

fn rms_norm_matches_the_reference<E: Float>() {
    compare::<E>(false);
}

/// Inputs of one comparison, and the results of the reference.
struct Case<E> {
    x: Vec<E>,
    branch: Vec<E>,
    dy: Vec<E>,
    before: Vec<E>,
    gain: Vec<E>,
    bias: Vec<E>,
    rows: usize,
    dim: usize,
    layer: bool,
}

impl<E: Float> Case<E> {
    fn new((rows, dim): (usize, usize), layer: bool) -> Case<E> {
        let matrix = |stream| numbers::<E>(rows * dim, stream);
        let (x, branch, dy, before) = (matrix(1), matrix(6), matrix(2), matrix(5));
        let (gain, bias) = (numbers::<E>(dim, 3), numbers::<E>(dim, 4));
        Case { x, branch, dy, before, gain, bias, rows, dim, layer }
    }

    fn forward(&self, x: &[E]) -> Vec<f64> {
        let (x, gain, bias) = (to_f64(x), to_f64(&self.gain), to_f64(&self.bias));
        if self.layer {
            reference::layer_forward(&x, &gain, &bias, EPS)
        } else {
            reference::rms_forward(&x, &gain, EPS)
        }
    }

    /// Gradients of x, gain and bias.
    fn backward(&self) -> [Vec<f64>; 3] {
        let (x, gain, dy) = (to_f64(&self.x), to_f64(&self.gain), to_f64(&self.dy));
        if self.layer {
            let (dx, dgain, dbias) = reference::layer_backward(&x, &gain, EPS, &dy);
            [dx, dgain, dbias]
        } else {
            let (dx, dgain) = reference::rms_backward(&x, &gain, EPS, &dy);
            [dx, dgain, vec![0.0; self.dim]]
        }
    }
}

fn compare<E: Float>(layer: bool) {
    // 2048 and 8192 have kernels of their own on a GPU.
    let shapes = SHAPES.into_iter().chain([(600, 768), (70, 2048), (9, 8192)]);
    for (shape, offset) in shapes.flat_map(|shape| OFFSETS.map(|offset| (shape, offset))) {
        let case = Case::<E>::new(shape, layer);
        let sum: Vec<E> = case
            .x
            .iter()
            .zip(&case.branch)
            .map(|(x, branch)| E::round_from(x.as_f32() + branch.as_f32()))
            .collect();
        let [dx, dgain, dbias] = case.backward();
        let added: Vec<f64> = dx.iter().zip(to_f64(&case.before)).map(|(d, b)| d + b).collect();
        let mut sums = vec![0.0; case.dim];
        for row in added.chunks_exact(case.dim) {
            row.iter().zip(&mut sums).for_each(|(d, sum)| *sum += d);
        }
        let expected =
            [case.forward(&case.x), to_f64(&sum), case.forward(&sum), added, dgain, dbias, sums];
        // A row of one element has no variance, so its gradient is rounding error divided by √eps. Sums of rounded
        // gradients have the rounding errors of all rows.
        let bound = if case.dim == 1 { 1e-3 } else { 5e-5 };
        let rounding = if size_of::<E>() == 2 { 0.05 * (case.rows as f64).sqrt() } else { 0.0 };
        let what = format!("layer {layer}, {shape:?} from {offset}");
        let run = || run(&case, offset);
        let [out, x, out2, dx, dgain, dbias, sums] = expected;
        check(&what, tolerance::<E>(bound), [out, x, out2, dx, dgain, dbias], || {
            let [out, x, out2, dx, dgain, dbias, _] = run();
            [out, x, out2, dx, dgain, dbias]
        });
        check(&what, bound + rounding, [sums], || {
            let [.., sums] = run();
            [sums]
        });
    }
}

/// The output of the norm; the sum of x and branch and its norm; gradients of x, gain and bias, and sums of the first.
fn run<E: Float>(case: &Case<E>, offset: usize) -> [Vec<f64>; 7] {
    let Case { rows, dim, layer, .. } = *case;
    let matrix = |values: &[E]| Data::new(offset, (rows, dim), values);
    let (gain, bias) = (Data::row(offset, &case.gain), Data::row(offset, &case.bias));
    let params = match layer {
        true => NormParams::Layer { gain: gain.view(), bias: bias.view() },
        false => NormParams::Rms { gain: gain.view() },
    };
    let per_row = if layer { 2 } else { 1 };
    let [mut stats, mut stats2] =
        [(); 2].map(|_| Data::new(0, (rows, per_row), &vec![0f32; rows * per_row]));
    let x = matrix(&case.x);
    let [mut out, mut again, mut out2] = [(); 3].map(|_| matrix(&case.dy));
    device().norm(params, x.view(), EPS as f32, out.view_mut(), stats.view_mut());
    device().norm_recompute(params, x.view(), stats.view(), again.view_mut());
    assert_eq!(out.read::<E>(), again.read::<E>(), "recomputed output differs");

    let (mut sum, branch) = (matrix(&case.x), matrix(&case.branch));
    let written = [sum.view_mut(), out2.view_mut(), stats2.view_mut()];
    device().add_norm(params, written, branch.view(), EPS as f32);

    // Overwrites the gradients of the parameters, then adds to them: the difference is the gradient again.
    let dy = matrix(&case.dy);
    let inputs = [x.view(), gain.view(), stats.view()];
    let [mut dgain, mut dbias, mut sums] = [(); 3].map(|_| Data::row(0, &vec![9f32; dim]));
    let mut dx = matrix(&case.before);
    let gradients = NormGradients {
        gain: dgain.view_mut(),
        bias: layer.then(|| dbias.view_mut()),
        accumulate: false,
    };
    device().norm_backward_and_sum(inputs, dy.view(), dx.view_mut(), gradients, sums.view_mut());
    let (dx_once, dgain_once) = (dx.read::<E>(), dgain.read::<f32>());
    let mut dx = matrix(&case.before);
    let gradients = NormGradients {
        gain: dgain.view_mut(),
        bias: layer.then(|| dbias.view_mut()),
        accumulate: true,
    };
    device().norm_backward(inputs, dy.view(), dx.view_mut(), gradients);
    assert_eq!(dx.read::<E>(), dx_once, "the gradient depends on whether its sums are computed");
    let twice: Vec<f64> = dgain_once.iter().map(|gain| 2.0 * *gain as f64).collect();
    close("gradients are added to", 1e-5, &twice, &dgain.read_f64::<f32>());
    let dbias = match layer {
        true => dbias.read::<f32>().iter().map(|bias| *bias as f64 / 2.0).collect(),
        false => vec![0.0; dim],
    };
    [
        out.read_f64::<E>(),
        sum.read_f64::<E>(),
        out2.read_f64::<E>(),
        dx.read_f64::<E>(),
        to_f64(&dgain_once),
        dbias,
        sums.read_f64::<f32>(),
    ]
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() {
    let x: Vec<f32> = numbers::<f32>(512, 1).iter().map(|x| x + 1e4).collect();
    let (gain, bias) = (vec![1f32; 512], vec![0f32; 512]);
    let expected = reference::layer_forward(&to_f64(&x), &to_f64(&gain), &to_f64(&bias), EPS);
    check("mean of 1e4", 3e-3, [expected], || {
        let (gain, bias) = (Data::row(0, &gain), Data::row(0, &bias));
        let (mut out, mut stats) = (Data::row(0, &x), Data::row(0, &[0f32; 2]));
        let params = NormParams::Layer { gain: gain.view(), bias: bias.view() };
        let x = Data::row(0, &x);
        device().norm(params, x.view(), EPS as f32, out.view_mut(), stats.view_mut());
        [out.read_f64::<f32>()]
    });
}
