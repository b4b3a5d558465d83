//! Name, precision, communication, checkpoints.

use super::findings::Findings;
use crate::config::{Compute, Config};
use crate::plan::{Checkpoint, Comm, Precision};

/// It becomes a folder.
pub(super) fn name(findings: &mut Findings) -> String {
    let name = findings.config.name.clone().unwrap_or_else(|| "run".into());
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\\', '\0']) {
        let what = format!("\"{name}\" cannot be the name of a folder");
        findings.add(&["name"], what, "take letters, digits, - and _");
    }
    name
}

pub(super) fn precision(config: &Config) -> Precision {
    Precision { compute: config.precision.compute.unwrap_or(Compute::F32) }
}

pub(super) fn comm(findings: &mut Findings) -> Comm {
    let typed = &findings.config.comm;
    let timeout_s = typed.timeout_s.unwrap_or(30.0);
    let bucket_mb = typed.bucket_mb.unwrap_or(25.0);
    findings.require(timeout_s > 0.0, "comm.timeout_s", timeout_s, "it must be more than 0");
    findings.require(bucket_mb > 0.0, "comm.bucket_mb", bucket_mb, "it must be more than 0");
    let overlap = typed.overlap;
    Comm { timeout_s, bucket_bytes: (bucket_mb * 1048576.0) as usize, overlap }
}

pub(super) fn checkpoint(config: &Config) -> Checkpoint {
    let typed = &config.checkpoint;
    Checkpoint { every: typed.every.unwrap_or(0), keep: typed.keep.unwrap_or(3) }
}
