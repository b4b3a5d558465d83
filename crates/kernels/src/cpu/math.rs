//! Exponential functions and logarithm of one f32, without branches or tables, so that loops over them vectorize. Errors
//! are at most 2 units in the last place (3 for `sigmoid`); infinities and NaN are handled.

use super::simd::Isa;

/// Adding it leaves the nearest integer in the low bits of the mantissa: 1.5 * 2^23.
const ROUNDER: f32 = 12_582_912.0;

/// ln 2 in two parts; the first has few enough bits that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `e^r - 1 = r + r² q(r)` for |r| ≤ ln 2 / 2; interpolated at Chebyshev points.
#[inline(always)]
fn exp_m1<I: Isa>(r: f32) -> f32 {
    let q = I::fma(1.392_618_4e-3, r, 8.363_179e-3);
    let q = I::fma(q, r, 4.166_655_5e-2);
    let q = I::fma(q, r, 0.166_665_77);
    let q = I::fma(q, r, 0.5);
    I::fma(q, r * r, r)
}

/// Splits `x = n ln 2 + r`; n is in the low bits of the word.
#[inline(always)]
fn reduce<I: Isa>(x: f32) -> (u32, f32) {
    let shifted = I::fma(x, std::f32::consts::LOG2_E, ROUNDER);
    let n = shifted - ROUNDER;
    let r = I::fma(n, -LN2_LOW, I::fma(n, -LN2_HIGH, x));
    (shifted.to_bits(), r)
}

/// Clamps `x`; NaN stays NaN, which `f32::clamp` guarantees and `max` and `min` do not.
#[inline(always)]
pub(crate) fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `e^x` for x up to 88. Softmax and sigmoid need only x ≤ 0, and an upper bound would cost time. Subnormal results are
/// zero.
#[inline(always)]
pub(crate) fn exp<I: Isa>(x: f32) -> f32 {
    let (n, r) = reduce::<I>(x);
    let e = (exp_m1::<I>(r) + 1.0) * exp2_int(n);
    if x < -87.336_54 { 0.0 } else { e }
}

/// 2^n for a normal result; only the low bits of `n` are used.
#[inline(always)]
fn exp2_int(n: u32) -> f32 {
    f32::from_bits((n << 23).wrapping_add(1f32.to_bits()))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<I: Isa>(x: f32) -> f32 {
    // Uses e^-|x|, which cannot overflow.
    let small = exp::<I>(-x.abs());
    (if x < 0.0 { small } else { 1.0 }) / (1.0 + small)
}

/// The natural logarithm.
#[inline(always)]
pub(crate) fn log<I: Isa>(x: f32) -> f32 {
    // Scale subnormal numbers into the normal range.
    let small = x < f32::MIN_POSITIVE;
    let scaled = if small { x * 8_388_608.0 } else { x };
    // x = m 2^e with m from √½ to √2.
    let offset = scaled.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (offset as i32 >> 23) as f32 - if small { 23.0 } else { 0.0 };
    let f = f32::from_bits((offset & 0x007f_ffff).wrapping_add(0x3f35_04f3)) - 1.0;

    // ln(1 + f) = f - f²/2 + f³ q(f), interpolated at Chebyshev points.
    let q = I::fma(6.971_611e-2, f, -0.114_797_34);
    let q = I::fma(q, f, 0.116_854_2);
    let q = I::fma(q, f, -0.124_256_87);
    let q = I::fma(q, f, 0.142_490_58);
    let q = I::fma(q, f, -0.166_678_02);
    let q = I::fma(q, f, 0.200_007_16);
    let q = I::fma(q, f, -0.249_999_97);
    let q = I::fma(q, f, 0.333_333_3);
    let square = f * f;
    let tail = I::fma(q * square, f, I::fma(e, LN2_LOW, -0.5 * square));
    let value = I::fma(e, LN2_HIGH, f + tail);

    let value = if x == f32::INFINITY { x } else { value };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x >= 0.0 { value } else { f32::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Level;
    use crate::cpu::simd::multiversion;

    multiversion! {
        fn exps<I>(x: &mut [f32]) {
            for x in x {
                // Beyond 88 the result is unspecified.
                *x = if *x > 88.0 { f32::NAN } else { exp::<I>(*x) };
            }
        }

        fn sigmoids<I>(x: &mut [f32]) {
            for x in x {
                *x = sigmoid::<I>(*x);
            }
        }

        fn logs<I>(x: &mut [f32]) {
            for x in x {
                *x = log::<I>(*x);
            }
        }
    }

    /// The largest error, in units in the last place, and where it occurs, over every 9973rd f32 and special values.
    fn max_error(level: Level, fast: fn(Level, &mut [f32]), exact: fn(f64) -> f64) -> (f64, f32) {
        let special = [
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::MIN_POSITIVE,
            f32::MAX,
            1.0,
            -1.0,
        ];
        let inputs: Vec<f32> =
            (0..=u32::MAX).step_by(9973).map(f32::from_bits).chain(special).collect();
        let mut outputs = inputs.clone();
        fast(level, &mut outputs);
        let mut worst = (0.0, 0.0);
        for (&x, &y) in inputs.iter().zip(&outputs) {
            let expected = exact(x as f64);
            // Subnormal results may be zero.
            let error = if expected.abs() < f32::MIN_POSITIVE as f64 {
                if y.abs() <= f32::MIN_POSITIVE { 0.0 } else { f64::INFINITY }
            } else if expected.is_nan() || y.is_nan() {
                if expected.is_nan() == y.is_nan() { 0.0 } else { f64::INFINITY }
            } else if (expected as f32).is_infinite() || y.is_infinite() {
                if expected as f32 == y { 0.0 } else { f64::INFINITY }
            } else {
                (y as f64 - expected).abs() / ulp(expected)
            };
            if error > worst.0 {
                worst = (error, x);
            }
        }
        worst
    }

    /// Unit in the last place of f32 at `value`.
    fn ulp(value: f64) -> f64 {
        let exponent = value.abs().log2().floor();
        (exponent - 23.0).exp2()
    }

    #[test]
    fn errors_are_at_most_a_few_ulps_over_all_of_f32() {
        for level in Level::of_this_machine().and_below() {
            for (name, fast, exact, bound) in [
                (
                    "exp",
                    exps as fn(Level, &mut [f32]),
                    (|x| if x > 88.0 { f64::NAN } else { x.exp() }) as fn(f64) -> f64,
                    2.0,
                ),
                ("log", logs, f64::ln, 2.0),
                ("sigmoid", sigmoids, |x| 1.0 / (1.0 + (-x).exp()), 3.0),
            ] {
                let (error, x) = max_error(level, fast, exact);
                assert!(error <= bound, "{level:?}: error of {name}({x:e}) is {error} ulps");
            }
        }
    }
}
