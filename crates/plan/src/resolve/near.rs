//! Valid numbers close to an invalid one, for suggestions.

/// The divisors of `whole` below and above `number`: `4 or 8` for 6 and 128. Both arguments are at least 1.
pub(crate) fn divisors(number: usize, whole: usize) -> String {
    divisors_that(number, whole, |_| true)
}

/// The same among the divisors that satisfy `fits`.
pub(crate) fn divisors_that(number: usize, whole: usize, fits: impl Fn(&usize) -> bool) -> String {
    let small = (1..=whole.isqrt()).filter(|divisor| whole.is_multiple_of(*divisor));
    let both = small.flat_map(|divisor| [divisor, whole / divisor]);
    let all: Vec<usize> = both.filter(fits).collect();
    let below = all.iter().copied().filter(|divisor| *divisor < number).max();
    let above = all.iter().copied().filter(|divisor| *divisor > number).min();
    either(below, above)
}

/// The multiples of `step` below and above `number`: `30 or 36` for 32 and 6.
pub(crate) fn multiples(number: usize, step: usize) -> String {
    let below = Some(number / step * step).filter(|multiple| *multiple > 0);
    either(below, Some((number / step + 1) * step))
}

pub(crate) fn either(below: Option<usize>, above: Option<usize>) -> String {
    match (below, above) {
        (Some(below), Some(above)) => format!("{below} or {above}"),
        (Some(one), None) | (None, Some(one)) => one.to_string(),
        (None, None) => "1".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours() {
        assert_eq!(divisors(6, 128), "4 or 8");
        assert_eq!(divisors(200, 128), "128");
        assert_eq!(divisors(2, 7), "1 or 7");
        assert_eq!(divisors(3, 1), "1");
        assert_eq!(divisors_that(3, 12, |divisor| *divisor != 2), "1 or 4");
        assert_eq!(multiples(32, 6), "30 or 36");
        assert_eq!(multiples(2, 5), "5");
    }
}
