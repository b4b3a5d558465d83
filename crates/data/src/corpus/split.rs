//! The split of documents into training and held-out. Pure.

/// Training or held-out. Every document is in exactly one split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train = 0,
    HeldOut = 1,
}

/// Documents whose hash is below the threshold are held out. The hash is of the text, so copies of a document are in
/// the same split, and a document stays in its split when others are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(u64);

impl Threshold {
    /// Holds out about this fraction of the documents; at least one if it is not zero.
    pub fn new(fraction: f64, hashes: impl Iterator<Item = u64>) -> Result<Threshold, String> {
        if !(0.0..1.0).contains(&fraction) {
            return Err(format!(
                "held_out must be at least 0 and less than 1 (got {fraction}); try 0.01"
            ));
        }
        let (mut least, mut most, mut count) = (u64::MAX, 0, 0u64);
        for hash in hashes {
            (least, most, count) = (least.min(hash), most.max(hash), count + 1);
        }
        if count == 0 {
            return Err("has no documents".to_string());
        }
        if fraction == 0.0 {
            return Ok(Threshold(0));
        }
        // Less than 2⁶⁴: the fraction is below one and the conversion rounds down.
        let wanted = (fraction * 64f64.exp2()) as u64;
        let threshold = wanted.max(least.saturating_add(1));
        if most < threshold {
            return Err(format!(
                "held_out = {fraction} would hold out all {count} documents; \
                 prepare more documents (--cut, --split-on) or set held_out = 0"
            ));
        }
        Ok(Threshold(threshold))
    }

    pub fn split_of(&self, hash: u64) -> Split {
        if hash < self.0 { Split::HeldOut } else { Split::Train }
    }
}

/// In hex digits.
impl std::fmt::Display for Threshold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_out(fraction: f64, hashes: &[u64]) -> Result<Vec<u64>, String> {
        let threshold = Threshold::new(fraction, hashes.iter().copied())?;
        let out = |hash: &u64| threshold.split_of(*hash) == Split::HeldOut;
        Ok(hashes.iter().copied().filter(out).collect())
    }

    #[test]
    fn a_quarter_of_the_hash_range_is_held_out() {
        let hashes = [1 << 60, 3 << 61, 1 << 63, u64::MAX, 5];
        assert_eq!(held_out(0.25, &hashes).unwrap(), [1 << 60, 5]);
    }

    #[test]
    fn zero_holds_out_nothing() {
        assert!(held_out(0.0, &[0, 1, u64::MAX]).unwrap().is_empty());
    }

    #[test]
    fn at_least_one_document_is_held_out() {
        assert_eq!(held_out(0.001, &[7 << 60, 6 << 60, 5 << 60]).unwrap(), [5 << 60]);
    }

    #[test]
    fn errors_suggest_a_fix() {
        for (fraction, hashes, hint) in [
            (1.0, &[1, 2][..], "try 0.01"),
            (f64::NAN, &[1, 2], "try 0.01"),
            (0.1, &[7 << 60], "--cut"),
            (0.1, &[7 << 60, 7 << 60], "held_out = 0"),
            (0.0, &[], "no documents"),
        ] {
            let error = held_out(fraction, hashes).unwrap_err();
            assert!(error.contains(hint), "{error}");
        }
    }
}
