//! `[checkpoint]`: how often, and how many are kept.

use super::Reader;

/// `[checkpoint]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Checkpoint {
    /// Steps between two; 0: only at the end.
    pub every: Option<usize>,
    /// How many stay; 0: all.
    pub keep: Option<usize>,
    /// Besides, every step that is a multiple of this stays for good; 0: none.
    pub keep_every: Option<usize>,
}

impl Checkpoint {
    pub(super) fn read(reader: &mut Reader) -> Checkpoint {
        Checkpoint {
            every: reader.count("checkpoint.every"),
            keep: reader.count("checkpoint.keep"),
            keep_every: reader.count("checkpoint.keep_every"),
        }
    }
}
