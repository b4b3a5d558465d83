use half::bf16;
use lockstep_kernels::reference::fp8::{decode, encode, scale};
use lockstep_kernels::reference::{gelu, swiglu};
use lockstep_kernels::{
    Device, Fp8Cast, Fp8Copies, Fp8Format, Fp8History, Fp8Source, Fp8Tensor, Matmul, Tag, View,
};

use crate::check::*;

const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];

/// Whether the device can run the tests: a CPU emulates fp8, but an old GPU does not.
fn skip() -> bool {
    device().device_type() == lockstep_kernels::DeviceType::Cuda && !device().has_fp8()
}

fn cast(device: &Device, from: Fp8Source<'_>, format: Fp8Format, copies: Fp8Copies) -> Fp8Tensor {
    device.fp8_cast(Fp8Cast {
        from,
        format,
        copies,
        tag: Tag::Buffers,
        column_sums: None,
        history: None,
    })
}

fn whole(x: View<'_>, format: Fp8Format) -> Fp8Tensor {
    cast(&device(), Fp8Source::Whole(x), format, Fp8Copies::Both)
}

fn codes(view: View<'_>) -> Vec<u8> {
    device().to_vec(view)
}

/// (cols, rows)
fn transposed<T: Copy>(x: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// The values of an fp8 matrix.
fn values(x: &Fp8Tensor) -> Vec<f64> {
    let inverse = device().to_vec::<f32>(x.scale())[0] as f64;
    codes(x.plain()).iter().map(|code| decode(x.format, *code) * inverse).collect()
}

/// A code without the sign of a NaN.
fn without_nan_sign(format: Fp8Format, code: &u8) -> u8 {
    if decode(format, *code).is_nan() { 0x7f } else { *code }
}

/// Every bf16 number up to the largest of the format, with a scale of 1, and NaNs.
#[test]
fn all_numbers_round_to_the_nearest_code() {
    if skip() {
        return;
    }
    for format in FORMATS {
        let all = (0..=u16::MAX).map(bf16::from_bits);
        let fits = |x: &bf16| x.is_nan() || x.to_f32().abs() <= format.max();
        let mut x: Vec<bf16> = all.filter(fits).collect();
        x.resize(x.len().next_multiple_of(256), bf16::ZERO);
        let shape = (x.len() / 16, 16);
        let data = Data::new(0, shape, &x);
        let got = whole(data.view(), format);
        assert_eq!(device().to_vec::<f32>(got.scale()), [1.0, 1.0]);
        let expected: Vec<u8> = x.iter().map(|x| encode(format, x.to_f32())).collect();
        let compare = |got: Vec<u8>, expected: &[u8], x: &[bf16]| {
            for ((got, expected), x) in got.iter().zip(expected).zip(x) {
                let [got, expected] = [got, expected].map(|code| without_nan_sign(format, code));
                assert_eq!(got, expected, "{format:?} of {x}");
            }
        };
        compare(codes(got.plain()), &expected, &x);
        let (expected, x) = (transposed(&expected, shape.0, 16), transposed(&x, shape.0, 16));
        compare(codes(got.transposed()), &expected, &x);
    }
}

#[test]
fn casts_match_the_reference() {
    if skip() {
        return;
    }
    for (rows, cols) in [(16, 16), (48, 144), (128, 128), (272, 400), (1040, 64), (16, 1600)] {
        for (format, size) in [(Fp8Format::E4m3, 3.0), (Fp8Format::E5m2, 1e-6)] {
            let x: Vec<f32> = numbers::<bf16>(rows * cols, 1).iter().map(|x| x.to_f32()).collect();
            let x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(x * size)).collect();
            let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
            let scales = scale(format, &wide);
            let expected: Vec<u8> = wide.iter().map(|x| encode(format, x * scales[1])).collect();
            let data = Data::new(0, (rows, cols), &x);
            for copies in [Fp8Copies::Plain, Fp8Copies::Transposed, Fp8Copies::Both] {
                let got = cast(&device(), Fp8Source::Whole(data.view()), format, copies);
                assert_eq!(device().to_vec::<f32>(got.scale()), scales);
                if copies != Fp8Copies::Transposed {
                    assert_eq!(codes(got.plain()), expected, "({rows}, {cols})");
                }
                if copies != Fp8Copies::Plain {
                    let expected = transposed(&expected, rows, cols);
                    assert_eq!(codes(got.transposed()), expected, "({rows}, {cols})");
                }
            }
            // A matrix of zeros, after the state of another.
            let zeros = Data::new(0, (rows, cols), &vec![bf16::ZERO; rows * cols]);
            let got = whole(zeros.view(), format);
            assert_eq!(device().to_vec::<f32>(got.scale()), [1.0, 1.0]);
            assert!(codes(got.plain()).iter().all(|code| *code == 0));
        }
    }
}

/// Infinities and NaNs end up as NaNs in a product.
#[test]
fn numbers_that_are_not_finite_are_not_hidden() {
    if skip() {
        return;
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = numbers::<bf16>(32 * 16, 1);
        x[100] = bf16::from_f32(bad);
        let (x, w) = (Data::new(0, (32, 16), &x), Data::new(0, (16, 16), &numbers::<bf16>(256, 2)));
        let [x, w] = [&x, &w].map(|data| whole(data.view(), Fp8Format::E4m3));
        let mut y = Data::new(0, (32, 16), &vec![bf16::ZERO; 32 * 16]);
        device().matmul(Matmul::fp8_linear(&x, &w, y.view_mut()));
        assert!(y.read_f64::<bf16>()[6 * 16..7 * 16].iter().all(|y| y.is_nan()), "{bad}");
    }
}

#[test]
fn activation_functions_are_applied_before_the_cast() {
    if skip() {
        return;
    }
    let (rows, cols) = (144, 272);
    let (x, d) = (numbers::<bf16>(rows * cols, 1), numbers::<bf16>(rows * cols, 2));
    let gate_up = numbers::<bf16>(rows * 2 * cols, 3);
    let gelu: Vec<f64> = to_f64(&x).into_iter().map(gelu::forward).collect();
    let slopes = to_f64(&x).into_iter().map(gelu::slope);
    let gradient: Vec<f64> = slopes.zip(to_f64(&d)).map(|(slope, d)| slope * d).collect();
    let swiglu = swiglu::forward(&to_f64(&gate_up), cols);
    let sums: Vec<f64> =
        (0..cols).map(|col| gradient.iter().skip(col).step_by(cols).sum::<f64>() + 1.0).collect();
    let [x, d] = [x, d].map(|x| Data::new(0, (rows, cols), &x));
    let gate_up = Data::new(0, (rows, 2 * cols), &gate_up);
    let mut got_sums = Data::row(0, &vec![1.0f32; cols]);
    let casts = [
        (Fp8Source::Gelu(x.view()), Fp8Format::E4m3, gelu),
        (Fp8Source::Swiglu(gate_up.view()), Fp8Format::E4m3, swiglu),
        (Fp8Source::GeluGradient { x: x.view(), d: d.view() }, Fp8Format::E5m2, gradient),
    ];
    for (from, format, expected) in casts {
        let gradient = format == Fp8Format::E5m2;
        let column_sums = gradient.then(|| (got_sums.view_mut(), true));
        let (copies, tag) = (Fp8Copies::Both, Tag::Buffers);
        let got =
            device().fp8_cast(Fp8Cast { from, format, copies, tag, column_sums, history: None });
        // Half a unit in the last place of 3 or 2 bits; the smallest numbers have fewer.
        let most = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let (relative, absolute) = if gradient { (0.126, 1e-6) } else { (0.063, 1e-3) };
        for (got, expected) in values(&got).iter().zip(&expected) {
            let bound = relative * expected.abs() + absolute * most;
            assert!((got - expected).abs() <= bound, "{from:?}: {got}, expected {expected}");
        }
        assert_eq!(codes(got.transposed()), transposed(&codes(got.plain()), rows, cols));
    }
    close("column sums", 1e-4, &sums, &got_sums.read_f64::<f32>());
}

/// Products of the values that the casts give, with all epilogues.
#[test]
fn multiplies_match_the_reference() {
    if skip() {
        return;
    }
    for [rows, inputs, outputs] in [[16, 16, 16], [64, 128, 48], [144, 272, 400], [256, 512, 128]] {
        let x = Data::new(0, (rows, inputs), &numbers::<bf16>(rows * inputs, 1));
        let w = Data::new(0, (outputs, inputs), &numbers::<bf16>(outputs * inputs, 2));
        let dy = Data::new(0, (rows, outputs), &numbers::<bf16>(rows * outputs, 3));
        let bias = Data::row(0, &numbers::<bf16>(outputs, 4));
        let residual = Data::new(0, (rows, outputs), &numbers::<bf16>(rows * outputs, 5));
        let before = Data::new(0, (rows, inputs), &numbers::<bf16>(rows * inputs, 6));
        let [x8, w8] = [&x, &w].map(|data| whole(data.view(), Fp8Format::E4m3));
        let dy8 = whole(dy.view(), Fp8Format::E5m2);
        let [xs, ws, dys] = [&x8, &w8, &dy8].map(values);
        // a (m, k), b (n, k)
        let product = |a: &[f64], b: &[f64], m: usize, n: usize, k: usize| -> Vec<f64> {
            let one = |i: usize| (0..k).map(|p| a[i / n * k + p] * b[i % n * k + p]).sum();
            (0..m * n).map(one).collect()
        };
        let (wt, dyt) = (transposed(&ws, outputs, inputs), transposed(&dys, rows, outputs));
        let xt = transposed(&xs, rows, inputs);
        let y = product(&xs, &ws, rows, outputs, inputs);
        let (bias64, residual64) = (bias.read_f64::<bf16>(), residual.read_f64::<bf16>());
        let y: Vec<f64> =
            (0..y.len()).map(|i| y[i] + bias64[i % outputs] + residual64[i]).collect();
        let dx = product(&dys, &wt, rows, inputs, outputs);
        let slopes = before.read_f64::<bf16>().into_iter().map(gelu::slope);
        let dbefore: Vec<f64> = dx.iter().zip(slopes).map(|(dx, slope)| dx * slope).collect();
        let dw = product(&dyt, &xt, outputs, inputs, rows);
        let added = dw.iter().map(|dw| dw + 1.0).collect();
        // Errors are relative to the size of the sums.
        let scale = 1.0 / (inputs.max(outputs).max(rows) as f64).sqrt();
        let small = |x: Vec<f64>| -> Vec<f64> { x.into_iter().map(|x| x * scale).collect() };
        let expected = [y, dx, dbefore, dw, added].map(small);
        check(&format!("({rows}, {inputs}) to {outputs}"), 0.01, expected, || {
            let empty = |rows, cols| Data::new(0, (rows, cols), &vec![bf16::ZERO; rows * cols]);
            let (mut y, mut dx) = (empty(rows, outputs), empty(rows, inputs));
            let (mut dbefore, ones) = (empty(rows, inputs), vec![1.0f32; outputs * inputs]);
            let [mut dw, mut added] = [(); 2].map(|_| Data::new(0, (outputs, inputs), &ones));
            device().matmul(Matmul {
                bias: Some(bias.view()),
                residual: Some(residual.view()),
                ..Matmul::fp8_linear(&x8, &w8, y.view_mut())
            });
            device().matmul(Matmul::fp8_linear_dx(&dy8, &w8, dx.view_mut()));
            device().matmul(Matmul {
                gelu_backward: Some(before.view()),
                ..Matmul::fp8_linear_dx(&dy8, &w8, dbefore.view_mut())
            });
            device().matmul(Matmul::fp8_linear_dw(&dy8, &x8, dw.view_mut()));
            device().matmul(Matmul {
                accumulate: true,
                ..Matmul::fp8_linear_dw(&dy8, &x8, added.view_mut())
            });
            let [y, dx, dbefore] = [y, dx, dbefore].map(|x| x.read_f64::<bf16>());
            [y, dx, dbefore, dw.read_f64::<f32>(), added.read_f64::<f32>()].map(small)
        });
    }
}

/// The first step takes the scale of the matrix, later ones that of the largest element before. Larger numbers saturate.
#[test]
fn delayed_scales_come_from_earlier_steps() {
    if skip() {
        return;
    }
    let device = device();
    let history = Fp8History::new(&device, 2);
    let cast = |size: f32, key: u64| {
        let x: Vec<bf16> = (0..256).map(|i| bf16::from_f32(size * i as f32 / 255.0)).collect();
        let x = Data::new(0, (16, 16), &x);
        let (format, copies, tag) = (Fp8Format::E4m3, Fp8Copies::Both, Tag::Buffers);
        let (from, history) = (Fp8Source::Whole(x.view()), Some((&history, key)));
        let got =
            device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums: None, history });
        let (plain, other) = (codes(got.plain()), codes(got.transposed()));
        assert_eq!(other, transposed(&plain, 16, 16));
        (device.to_vec::<f32>(got.scale())[1], decode(format, plain[255]))
    };
    assert_eq!(cast(2.0, 0), (224.0, 448.0));
    // Further micro-batches of the first step have no scale yet.
    assert_eq!(cast(4.0, 0), (112.0, 448.0));
    assert_eq!(cast(0.0, 1), (1.0, 0.0));
    history.advance(&device);
    assert_eq!(cast(2.0, 0), (112.0, 224.0));
    assert_eq!(cast(8.0, 0), (112.0, 448.0));
    assert_eq!(cast(1.0, 1), (1.0, 1.0));
    history.advance(&device);
    assert_eq!(cast(2.0, 0), (56.0, 112.0));
    assert_eq!(cast(1.0, 1), (448.0, 448.0));
    // Large numbers are forgotten after 16 steps.
    for _ in 0..16 {
        cast(2.0, 0);
        history.advance(&device);
    }
    assert_eq!(cast(2.0, 0), (224.0, 448.0));
    history.reset(&device);
    assert_eq!(cast(16.0, 0), (28.0, 448.0));
}
