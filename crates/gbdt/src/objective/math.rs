//! The exponential function in plain f32 arithmetic: the same bits on every machine, and loops over it vectorize.

/// e^x with a relative error of about 1e-7; 0 and infinity outside of the range of f32.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    /// Adding it rounds to an integer, in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.7);
    let n = clamped * LOG2_E + ROUND - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.987_569_2e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p * r + coefficient;
    }
    let p = p * r * r + r + 1.0;
    // 2^n in two factors, since 2^128 is not finite.
    let n = n as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let value = p * power(half) * power(n - half);
    match x {
        x if x < -103.0 => 0.0,
        x if x > 88.72 => f32::INFINITY,
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn close_to_the_standard_library() {
        for i in -870..=880 {
            let x = i as f32 / 10.0 + 0.0123;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 3e-7, "{x}: {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(1e9), f32::INFINITY);
    }
}
