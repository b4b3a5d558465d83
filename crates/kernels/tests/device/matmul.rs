use lockstep_kernels::reference::gelu;
use lockstep_kernels::{Float, Matmul};

use crate::check::*;

crate::both_types!(linear_layers_match_the_reference);

/// rows, inputs, outputs
const SIZES: [[usize; 3]; 6] =
    [[0, 8, 8], [1, 1, 1], [7, 17, 5], [33, 64, 24], [65, 130, 72], [128, 256, 512]];

/// `a · b` of (m, k) and (k, n), each transposed if its flag is set.
pub fn product(a: (&[f64], bool), b: (&[f64], bool), [m, k, n]: [usize; 3]) -> Vec<f64> {
    let at = |(x, transposed): (&[f64], bool), [row, col]: [usize; 2], [rows, cols]: [usize; 2]| {
        if transposed { x[col * rows + row] } else { x[row * cols + col] }
    };
    let one = |i: usize| {
        let (row, col) = (i / n, i % n);
        (0..k).map(|p| at(a, [row, p], [m, k]) * at(b, [p, col], [k, n])).sum()
    };
    (0..m * n).map(one).collect()
}

fn linear_layers_match_the_reference<E: Float>() {
    for [rows, inputs, outputs] in SIZES {
        // Scaled so that products are near 1.
        let scale = 1.0 / (inputs.max(outputs) as f32).sqrt();
        let scaled = |n, stream| -> Vec<E> {
            numbers::<E>(n, stream).iter().map(|x| E::round_from(x.as_f32() * scale)).collect()
        };
        let (x, weight) = (numbers::<E>(rows * inputs, 1), scaled(outputs * inputs, 2));
        let (dy, bias) = (scaled(rows * outputs, 3), numbers::<E>(outputs, 4));
        let residual = numbers::<E>(rows * outputs, 5);
        let before = numbers::<f32>(outputs * inputs, 6);
        let (xw, ww, dyw) = (to_f64(&x), to_f64(&weight), to_f64(&dy));
        let y = product((&xw, false), (&ww, true), [rows, inputs, outputs]);
        let dx = product((&dyw, false), (&ww, false), [rows, outputs, inputs]);
        let dw = product((&dyw, true), (&xw, false), [outputs, rows, inputs]);
        let pre: Vec<f64> =
            y.iter().enumerate().map(|(i, y)| y + to_f64(&bias)[i % outputs]).collect();
        let active: Vec<f64> = pre
            .iter()
            .zip(to_f64(&residual))
            .map(|(pre, residual)| gelu::forward(*pre) + residual)
            .collect();
        let added = dw.iter().zip(&before).map(|(dw, before)| dw + *before as f64).collect();
        let expected = [y, dx, added, pre, active];
        let bound = if size_of::<E>() == 2 { 0.02 } else { 1e-5 };
        check(&format!("({rows}, {inputs}) to {outputs}"), bound, expected, || {
            let (x, weight) =
                (Data::new(0, (rows, inputs), &x), Data::new(0, (outputs, inputs), &weight));
            let (dy, bias) = (Data::new(0, (rows, outputs), &dy), Data::row(0, &bias));
            let residual = Data::new(0, (rows, outputs), &residual);
            let empty = |rows, cols| Data::new(0, (rows, cols), &vec![E::default(); rows * cols]);
            let [mut y, mut pre, mut active] = [(); 3].map(|_| empty(rows, outputs));
            let mut dx = empty(rows, inputs);
            let mut dw = Data::new(0, (outputs, inputs), &before);
            device().matmul(Matmul::linear(x.view(), weight.view(), y.view_mut()));
            device().matmul(Matmul::linear_dx(dy.view(), weight.view(), dx.view_mut()));
            device().matmul(Matmul {
                accumulate: true,
                ..Matmul::linear_dw(dy.view(), x.view(), dw.view_mut())
            });
            device().matmul(Matmul {
                bias: Some(bias.view()),
                gelu: Some(pre.view_mut()),
                residual: Some(residual.view()),
                ..Matmul::linear(x.view(), weight.view(), active.view_mut())
            });
            let [y, dx, pre, active] = [y, dx, pre, active].map(|x| x.read_f64::<E>());
            [y, dx, dw.read_f64::<f32>(), pre, active]
        });
    }
}
