//! Collectives of ranks that share an accelerator: one kernel over the buffers of all members, limited by the memory.

use lockstep_plan::Collective;

use super::GroupPlacement;
use crate::cluster::{Cluster, Engine};

/// Seconds of a collective, while the other groups of its kind communicate as well.
pub(super) fn seconds(
    cluster: &Cluster,
    placement: GroupPlacement,
    collective: Collective,
    bytes: f64,
) -> f64 {
    let members = placement.members as f64;
    let groups = (cluster.per_host as f64 / members).max(1.0);
    let staged = cluster.engine == Engine::Staged;
    let link = &cluster.links[0];
    link.start()
        + (members - 1.0) * link.hop()
        + groups * moved(collective, members, bytes, staged) / cluster.bandwidth(0)
}

/// Bytes that are read and written. Staged members other than the first also copy their input and their output.
fn moved(collective: Collective, members: f64, bytes: f64, staged: bool) -> f64 {
    // Bytes of one member's input and output, and those that the kernel reads and writes.
    let (input, output, kernel) = match collective {
        Collective::SendRecv => {
            // The receiver copies the message, or what the sender has put into staging.
            return if staged { 4.0 * bytes } else { 2.0 * bytes };
        }
        Collective::ReduceScatter => (bytes, bytes / members, (members + 1.0) * bytes),
        Collective::AllGather => (bytes / members, bytes, (1.0 + members) * bytes),
        // All-reduce and all-to-all. Those with a root do not occur in a step.
        _ => (bytes, bytes, 2.0 * members * bytes),
    };
    kernel + if staged { 2.0 * (members - 1.0) * (input + output) } else { 0.0 }
}
