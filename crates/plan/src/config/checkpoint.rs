//! `[checkpoint]`: frequency and retention of checkpoints.

use super::Reader;

/// `[checkpoint]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Checkpoint {
    /// Steps between checkpoints; 0: only at the end.
    pub every: Option<usize>,
    /// Number of recent checkpoints to keep; 0: all.
    pub keep: Option<usize>,
    /// Checkpoints at multiples of this step are never deleted; 0: none.
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
