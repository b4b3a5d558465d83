//! Numbers of 8 bits: e4m3 (no infinities, one NaN per sign) and e5m2 (IEEE).

use crate::Fp8Format;

/// The bits of a number, rounded to nearest, ties to even. Numbers beyond the largest saturate, also infinities.
pub fn encode(format: Fp8Format, x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7f;
    }
    // The codes of finite numbers ascend with their values.
    let size = x.abs() as f64;
    let top = top_code(format);
    let (mut above, mut beyond) = (0, top + 1);
    while above < beyond {
        let middle = (above + beyond) / 2;
        match decode(format, middle) < size {
            true => above = middle + 1,
            false => beyond = middle,
        }
    }
    if above > top {
        return sign | top;
    }
    let below = above.saturating_sub(1);
    let (from_below, to_above) = (size - decode(format, below), decode(format, above) - size);
    let even = if below % 2 == 0 { below } else { above };
    sign | match from_below.total_cmp(&to_above) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Equal => even,
        std::cmp::Ordering::Greater => above,
    }
}

/// The value of a code.
pub fn decode(format: Fp8Format, code: u8) -> f64 {
    let (mantissa_bits, bias) = match format {
        Fp8Format::E4m3 => (3, 7),
        Fp8Format::E5m2 => (2, 15),
    };
    let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
    let exponent = ((code & 0x7f) >> mantissa_bits) as i32;
    let mantissa = (code & ((1 << mantissa_bits) - 1)) as f64 / f64::from(1 << mantissa_bits);
    match (code & 0x7f) - top_code(format).min(code & 0x7f) {
        0 if exponent == 0 => sign * mantissa * 2f64.powi(1 - bias),
        0 => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        1 if format == Fp8Format::E5m2 => sign * f64::INFINITY,
        _ => f64::NAN,
    }
}

/// The code of the largest finite number.
fn top_code(format: Fp8Format) -> u8 {
    match format {
        Fp8Format::E4m3 => 0x7e,
        Fp8Format::E5m2 => 0x7b,
    }
}

/// The inverse scale and the scale of a matrix, by its largest absolute value.
pub fn scale(format: Fp8Format, x: &[f32]) -> [f32; 2] {
    let amax = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let ratio = if amax == 0.0 { 1.0 } else { (format.max() / amax).min(2f32.powi(100)) };
    [1.0 / ratio, ratio]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_halves_round_to_even() {
        for format in [Fp8Format::E4m3, Fp8Format::E5m2] {
            assert_eq!(decode(format, top_code(format)), format.max() as f64);
            for code in 0..top_code(format) {
                let (low, high) = (decode(format, code), decode(format, code + 1));
                assert_eq!(encode(format, low as f32), code);
                assert_eq!(encode(format, -low as f32), code | 0x80);
                let even = if code % 2 == 0 { code } else { code + 1 };
                assert_eq!(encode(format, ((low + high) / 2.0) as f32), even);
            }
            assert_eq!(encode(format, f32::INFINITY), top_code(format));
            assert!(decode(format, encode(format, f32::NAN)).is_nan());
        }
        assert_eq!(decode(Fp8Format::E4m3, 1), 2f64.powi(-9));
        assert_eq!(decode(Fp8Format::E5m2, 1), 2f64.powi(-16));
        assert_eq!(encode(Fp8Format::E4m3, -1.0), 0xb8);
    }
}
