//! Decimal numbers in text: a fast path for short ones, the standard library for the rest.

/// Powers of ten that are exact in f64.
const POWERS: [f64; 23] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16,
    1e17, 1e18, 1e19, 1e20, 1e21, 1e22,
];

/// Parses a number. `None` if the text is not a number.
pub fn parse(text: &[u8]) -> Option<f64> {
    fast(text).or_else(|| std::str::from_utf8(text).ok()?.parse().ok())
}

/// Numbers whose digits fit 53 bits and whose exponent is a small power of ten: one exact multiplication or division
/// (Clinger 1990).
fn fast(text: &[u8]) -> Option<f64> {
    let (negative, mut rest) = match text.first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (mut digits, mut mantissa, mut exponent) = (0, 0u64, 0i32);
    let mut point = false;
    while let Some(byte) = rest.first() {
        match byte {
            b'0'..=b'9' => {
                mantissa = mantissa * 10 + u64::from(byte - b'0');
                digits += 1;
                exponent -= i32::from(point);
            }
            b'.' if !point => point = true,
            b'e' | b'E' => break,
            _ => return None,
        }
        rest = &rest[1..];
        if digits > 18 {
            return None;
        }
    }
    if digits == 0 || mantissa > 1 << 53 {
        return None;
    }
    if let [b'e' | b'E', power @ ..] = rest {
        exponent += std::str::from_utf8(power).ok()?.parse::<i16>().ok().map(i32::from)?;
    }
    let value = match exponent {
        0..=22 => mantissa as f64 * POWERS[exponent as usize],
        -22..0 => mantissa as f64 / POWERS[-exponent as usize],
        _ => return None,
    };
    Some(if negative { -value } else { value })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn equal_to_the_standard_library() {
        let texts = [
            "0",
            "-0",
            "1",
            "12.5",
            "-3.25e2",
            "1e-3",
            "1E+5",
            "123456789012345678",
            "0.1",
            "1e22",
            "1e23",
            "9007199254740993",
            "3.4028235e38",
            ".5",
            "5.",
            "inf",
            "nan",
            "-1.7e-300",
        ];
        for text in texts {
            let (ours, theirs) = (parse(text.as_bytes()).unwrap(), text.parse::<f64>().unwrap());
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{text}");
        }
        for text in ["", "-", ".", "1e", "e5", "1.2.3", "1x", "--1", " 1", "0x10"] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
    }
}
