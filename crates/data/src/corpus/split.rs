//! Which documents are trained on, and which are held out to see what was learned. Pure.

/// The two sides of a corpus. No document is on both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    Train = 0,
    HeldOut = 1,
}

/// Documents with a mark below it are held out. Marks follow from the text, so that copies of a document
/// are on the same side, and a document stays where it is when others are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold(u64);

impl Threshold {
    /// Holds out about this fraction of the documents; at least one, if it is not zero.
    pub fn new(fraction: f64, marks: impl Iterator<Item = u64>) -> Result<Threshold, String> {
        if !(0.0..1.0).contains(&fraction) {
            return Err(format!("held_out = {fraction} is not a fraction from 0 to 1; try 0.01"));
        }
        let (mut least, mut most, mut count) = (u64::MAX, 0, 0u64);
        for mark in marks {
            (least, most, count) = (least.min(mark), most.max(mark), count + 1);
        }
        if count == 0 {
            return Err("has no documents".to_string());
        }
        if fraction == 0.0 {
            return Ok(Threshold(0));
        }
        // 2⁶⁴ itself is out of reach: the fraction is below one, and an f64 rounds it down.
        let wanted = (fraction * 64f64.exp2()) as u64;
        let threshold = wanted.max(least.saturating_add(1));
        if most < threshold {
            return Err(format!(
                "all of its {count} documents would be held out by held_out = {fraction}; \
                 prepare it in more documents (--cut, --split-on), or set held_out = 0"
            ));
        }
        Ok(Threshold(threshold))
    }

    pub fn to_le_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    pub fn split_of(&self, mark: u64) -> Split {
        if mark < self.0 { Split::HeldOut } else { Split::Train }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_out(fraction: f64, marks: &[u64]) -> Result<Vec<u64>, String> {
        let threshold = Threshold::new(fraction, marks.iter().copied())?;
        let out = |mark: &u64| threshold.split_of(*mark) == Split::HeldOut;
        Ok(marks.iter().copied().filter(out).collect())
    }

    #[test]
    fn a_quarter_is_what_lies_below_a_quarter() {
        let marks = [1 << 60, 3 << 61, 1 << 63, u64::MAX, 5];
        assert_eq!(held_out(0.25, &marks).unwrap(), [1 << 60, 5]);
    }

    #[test]
    fn nothing_is_held_out_unless_asked() {
        assert!(held_out(0.0, &[0, 1, u64::MAX]).unwrap().is_empty());
    }

    #[test]
    fn one_document_is_held_out_where_none_falls_below() {
        assert_eq!(held_out(0.001, &[7 << 60, 6 << 60, 5 << 60]).unwrap(), [5 << 60]);
    }

    #[test]
    fn mistakes_are_told_with_the_way_out() {
        for (fraction, marks, hint) in [
            (1.0, &[1, 2][..], "try 0.01"),
            (f64::NAN, &[1, 2], "try 0.01"),
            (0.1, &[7 << 60], "--cut"),
            (0.1, &[7 << 60, 7 << 60], "held_out = 0"),
            (0.0, &[], "no documents"),
        ] {
            let error = held_out(fraction, marks).unwrap_err();
            assert!(error.contains(hint), "{error}");
        }
    }
}
