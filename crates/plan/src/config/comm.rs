//! `[comm]`: what ranks may expect of each other.

use super::Reader;

/// `[comm]` as typed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Comm {
    /// How long a rank waits for a peer before it calls it lost.
    pub timeout_s: Option<f64>,
    /// Gradients are reduced in buckets of about this many MiB.
    pub bucket_mb: Option<f64>,
    /// Whether exchanges go on beside the computing.
    pub overlap: Option<bool>,
}

impl Comm {
    pub(super) fn read(reader: &mut Reader) -> Comm {
        reader.absent(
            "comm.compression",
            &["none", "off"],
            "this build sends gradients as they are",
        );
        Comm {
            timeout_s: reader.number("comm.timeout_s"),
            bucket_mb: reader.number("comm.bucket_mb"),
            overlap: reader.flag("comm.overlap"),
        }
    }
}
