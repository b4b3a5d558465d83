use crate::check::*;
use lockstep_kernels::Code;
use lockstep_kernels::cpu::quantize;

/// Elements that share a scale.
const CHUNK: usize = 256;
use lockstep_kernels::cpu::{Cpu, Level};
use lockstep_kernels::reference::quantize as reference;

const CODES: [Code; 3] = [Code::Bf16, Code::F16, Code::Int8];

/// Returns (received values, new residual) for `x` and the previous residual.
fn packed(cpu: &Cpu, code: Code, x: &[f32], residual: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut residual, mut packed) = (residual.to_vec(), vec![0; code.bytes(x.len())]);
    quantize::quantize(cpu, code, x, &mut residual, &mut packed);
    let mut out = vec![f32::NAN; x.len()];
    quantize::dequantize(cpu, code, &packed, &mut out);
    (out, residual)
}

#[test]
fn matches_the_reference() {
    for (n, code) in LENGTHS.into_iter().flat_map(|n| CODES.map(|code| (n, code))) {
        let (x, residual) = (numbers::<f32>(n, 1), numbers::<f32>(n, 2));
        let sum: Vec<f32> = x.iter().zip(&residual).map(|(x, residual)| x + residual).collect();
        let expected = reference::round_trip(code, &to_f64(&sum));
        let lost =
            to_f64(&sum).iter().zip(&expected).map(|(sum, expected)| sum - expected).collect();
        let added = to_f64(&x).iter().zip(&expected).map(|(x, expected)| x + expected).collect();
        everywhere(&format!("{code:?} of {n}"), 1e-6, [expected, lost, added], |cpu| {
            let (mut residual, mut packed) = (residual.clone(), vec![0; code.bytes(n)]);
            quantize::quantize(cpu, code, &x, &mut residual, &mut packed);
            let (mut out, mut added) = (vec![f32::NAN; n], x.clone());
            quantize::dequantize(cpu, code, &packed, &mut out);
            quantize::dequantize_add(cpu, code, &packed, &mut added);
            [out, residual, added].map(|x| to_f64(&x))
        });
    }
}

/// At all magnitudes, received value plus residual is the input, and the residual is at most half a quantization step.
#[test]
fn residual_and_received_sum_to_the_input() {
    let cpu = Cpu::new(1);
    for power in (-149..=127).step_by(3) {
        let size = 2f64.powi(power);
        let x: Vec<f32> =
            numbers::<f32>(1000, 3).iter().map(|x| (*x as f64 / 8.0 * size) as f32).collect();
        for code in CODES {
            let (out, residual) = packed(&cpu, code, &x, &[0.0; 1000]);
            for (chunk, i) in (0..1000).map(|i| (i / CHUNK, i)) {
                let most = x[chunk * CHUNK..].iter().take(CHUNK).fold(0f32, |m, x| m.max(x.abs()));
                let (x, out, residual) = (x[i] as f64, out[i] as f64, residual[i] as f64);
                let smallest = 2f64.powi(-149);
                assert!(
                    (x - out - residual).abs() <= smallest,
                    "{code:?} 2^{power}: {x} {out} {residual}"
                );
                // Too close to zero for a scale: all of it stays in the residual.
                let step = match code {
                    Code::Bf16 => (x.abs() / 256.0).max(2f64.powi(-134)),
                    Code::F16 => (x.abs() / 2048.0).max(2f64.powi(-149)),
                    Code::Int8 if most < 4e-37 => x.abs(),
                    Code::Int8 => most as f64 / 254.0 * 1.000001,
                };
                let at_most = step.max(most as f64 * 2f64.powi(-38));
                assert!(residual.abs() <= at_most, "{code:?} 2^{power}: {x} leaves {residual}");
            }
        }
    }
}

#[test]
fn nan_and_infinity_are_sent_and_leave_no_residual() {
    for level in Level::of_this_machine().and_below() {
        let cpu = Cpu::at(level, 1);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (code, at) in CODES.into_iter().flat_map(|code| [0, 300, 599].map(|at| (code, at)))
            {
                let mut x = numbers::<f32>(600, 4);
                x[at] = bad;
                let (out, residual) = packed(&cpu, code, &x, &[0.0; 600]);
                assert!(
                    residual.iter().all(|residual| residual.is_finite()),
                    "{code:?} leaves a residual of {bad}"
                );
                let not_finite: Vec<usize> = (0..600).filter(|i| !out[*i].is_finite()).collect();
                let chunk = at / CHUNK * CHUNK..(at / CHUNK * CHUNK + CHUNK).min(600);
                match code {
                    Code::Bf16 => assert_eq!(not_finite, [at]),
                    _ => assert_eq!(not_finite, chunk.collect::<Vec<_>>(), "{code:?}"),
                }
                assert!(code != Code::Bf16 || out[at].to_bits() == bad.to_bits());
            }
        }
    }
}

#[test]
fn zeros_stay_zeros() {
    for code in CODES {
        let (out, residual) = packed(&Cpu::new(1), code, &[0.0; 300], &[0.0; 300]);
        assert!(out.iter().chain(&residual).all(|x| *x == 0.0), "{code:?}");
    }
}
