//! Human-readable numbers.

use std::fmt;
use std::time::Duration;

/// Formats as `18,204`, rounded.
pub fn thousands(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string();
    }
    let digits = format!("{:.0}", number.abs());
    let groups: Vec<&str> = digits.as_bytes().rchunks(3).rev().map(ascii).collect();
    format!("{}{}", if number <= -0.5 { "-" } else { "" }, groups.join(","))
}

fn ascii(digits: &[u8]) -> &str {
    std::str::from_utf8(digits).expect("digits are ASCII")
}

/// The unit of memory sizes: GiB from 1 GiB on, else MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryUnit {
    Gib,
    Mib,
}

impl MemoryUnit {
    pub fn of(bytes: u64) -> MemoryUnit {
        if bytes >= 1 << 30 { MemoryUnit::Gib } else { MemoryUnit::Mib }
    }

    /// `1.42` GiB, `75.0` MiB.
    pub fn number(self, bytes: u64) -> String {
        match self {
            MemoryUnit::Gib => format!("{:.2}", bytes as f64 / (1u64 << 30) as f64),
            MemoryUnit::Mib => format!("{:.1}", bytes as f64 / (1u64 << 20) as f64),
        }
    }
}

impl fmt::Display for MemoryUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryUnit::Gib => "GiB",
            MemoryUnit::Mib => "MiB",
        })
    }
}

/// The two largest units: `45s`, `2m14s`, `1h02m`, `3d07h`.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().round() as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let cases = [
            (0.0, "0"),
            (999.4, "999"),
            (999.5, "1,000"),
            (18_204.2, "18,204"),
            (1_234_567.0, "1,234,567"),
            (-1_000.0, "-1,000"),
            (-0.4, "0"),
            (f64::NAN, "NaN"),
        ];
        for (number, text) in cases {
            assert_eq!(thousands(number), text);
        }
        let memory = |bytes: u64| {
            let unit = MemoryUnit::of(bytes);
            format!("{} {unit}", unit.number(bytes))
        };
        assert_eq!([0, 75 << 20, 3 << 29].map(memory), ["0.0 MiB", "75.0 MiB", "1.50 GiB"]);
    }

    #[test]
    fn times() {
        let cases = [
            (0.4, "0s"),
            (59.6, "1m00s"),
            (134.0, "2m14s"),
            (3599.0, "59m59s"),
            (3725.0, "1h02m"),
            (86_399.0, "23h59m"),
            (3.0 * 86_400.0 + 7.5 * 3600.0, "3d07h"),
        ];
        for (seconds, text) in cases {
            assert_eq!(duration(Duration::from_secs_f64(seconds)), text);
        }
    }
}
