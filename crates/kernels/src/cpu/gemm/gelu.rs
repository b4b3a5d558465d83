//! GELU in its tanh form, for one value and for sixteen in a register.

/// `x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`, which is `x · σ(2√(2/π)·(x + 0.044715·x³))`.
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    let inner = TWICE_ROOT * (x + 0.044_715 * x * x * x);
    x / (1.0 + exp(-inner))
}

/// `gelu` on sixteen lanes, with the same steps as `exp` below.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
pub fn gelu_x16(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    let all = |value: f32| _mm512_set1_ps(value);
    let cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, all(0.044_715)));
    let inner = _mm512_mul_ps(_mm512_add_ps(x, cubic), all(-TWICE_ROOT));
    // min and max return their second operand if either is NaN.
    let z = _mm512_max_ps(all(-MAX_EXPONENT), _mm512_min_ps(all(MAX_EXPONENT), inner));
    let shifted = _mm512_fmadd_ps(z, all(std::f32::consts::LOG2_E), all(ROUND));
    let whole = _mm512_sub_ps(shifted, all(ROUND));
    let r = _mm512_fnmadd_ps(whole, all(LN2_LOW), _mm512_fnmadd_ps(whole, all(LN2_HIGH), z));
    let mut p = all(SERIES[0]);
    for term in &SERIES[1..] {
        p = _mm512_fmadd_ps(p, r, all(*term));
    }
    let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    let power = _mm512_add_epi32(power, _mm512_castps_si512(all(1.0)));
    let exp = _mm512_mul_ps(p, _mm512_castsi512_ps(power));
    _mm512_div_ps(x, _mm512_add_ps(exp, all(1.0)))
}

/// 2√(2/π).
const TWICE_ROOT: f32 = 1.595_769_2;
/// e^x saturates beyond this.
const MAX_EXPONENT: f32 = 87.0;
/// Adding 1.5·2^23 leaves the nearest integer in the low bits of the mantissa.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the low 9 bits of the first are zero, so its products with small integers are exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Taylor series of e^r, highest power first; for |r| ≤ ln2/2 the next term is below 1e-8.
const SERIES: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// e^x with a relative error of at most 2e-7; saturates at e^±87 instead of overflowing.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Comparisons are written so that NaN passes through.
    let x = if x > MAX_EXPONENT { MAX_EXPONENT } else { x };
    let x = if x < -MAX_EXPONENT { -MAX_EXPONENT } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let r = x - whole * LN2_HIGH - whole * LN2_LOW;
    let mut p = SERIES[0];
    for term in &SERIES[1..] {
        p = p * r + term;
    }
    let power = shifted.to_bits().wrapping_shl(23).wrapping_add(1.0f32.to_bits());
    p * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GELU of one value from both implementations, if the processor has AVX-512.
    fn both(x: f32) -> Vec<f32> {
        let mut values = vec![gelu(x)];
        #[cfg(target_arch = "x86_64")]
        if crate::cpu::Level::of_this_machine() >= crate::cpu::Level::Avx512 {
            use std::arch::x86_64::{_mm512_loadu_ps, _mm512_storeu_ps};
            let mut lanes = [x; 16];
            // SAFETY: the processor has AVX-512, and a vector is sixteen f32.
            unsafe {
                _mm512_storeu_ps(lanes.as_mut_ptr(), gelu_x16(_mm512_loadu_ps(lanes.as_ptr())))
            };
            values.extend(lanes);
        }
        values
    }

    #[test]
    fn close_to_f64_everywhere() {
        for step in -120_000..120_000 {
            let x = step as f32 * 1e-4;
            let want = crate::reference::gelu::forward(f64::from(x));
            for ours in both(x) {
                let error = (f64::from(ours) - want).abs();
                assert!(error <= 4e-7 * want.abs().max(0.1), "gelu({x}) = {ours} not {want}");
            }
        }
        for (x, want) in [(0.0, 0.0), (1e30, 1e30), (f32::INFINITY, f32::INFINITY)] {
            assert!(both(x).iter().all(|ours| *ours == want), "gelu({x})");
        }
        assert!(both(f32::NAN).iter().all(|ours| ours.is_nan()));
        assert!(both(-1e30).iter().all(|ours| ours.abs() < 1e-5));
    }
}
