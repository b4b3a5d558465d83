//! The communication of a step: repeated collectives with their group, link and duration.

use lockstep_plan::{Collective, GroupKind, Phase};
use serde::Serialize;

use super::{GroupPlacement, seconds};
use crate::cluster::Cluster;

/// A collective that a rank takes part in, repeated several times per step.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Flow {
    /// None: all ranks.
    pub kind: Option<GroupKind>,
    pub members: usize,
    pub collective: Collective,
    pub phase: Phase,
    /// Bytes of one call, as defined by [`seconds`].
    pub bytes: f64,
    pub times: f64,
    /// Index of the farthest link that it crosses.
    pub link: usize,
    /// Seconds of one call without other traffic on its links.
    pub seconds: f64,
}

impl Flow {
    /// Seconds per step.
    pub fn total(&self) -> f64 {
        self.times * self.seconds
    }

    /// Bytes that a rank sends per step.
    pub fn sent(&self) -> f64 {
        let n = self.members as f64;
        let share = match self.collective {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::SendRecv => 1.0,
            _ => (n - 1.0) / n,
        };
        self.times * share * self.bytes
    }
}

/// Collects the communication of a step.
pub(crate) struct Flows<'a> {
    pub cluster: &'a Cluster,
    pub list: Vec<Flow>,
}

impl<'a> Flows<'a> {
    pub fn new(cluster: &'a Cluster) -> Flows<'a> {
        Flows { cluster, list: Vec::with_capacity(16) }
    }

    /// Adds a collective and returns the seconds of one call; a group of one does not communicate.
    pub fn add(
        &mut self,
        (kind, placement): (GroupKind, GroupPlacement),
        collective: Collective,
        phase: Phase,
        bytes: f64,
        times: f64,
    ) -> f64 {
        if placement.members <= 1 || times == 0.0 {
            return 0.0;
        }
        let seconds = seconds(self.cluster, placement, collective, bytes);
        let link = placement.link(self.cluster);
        self.list.push(Flow {
            kind: Some(kind),
            members: placement.members,
            collective,
            phase,
            bytes,
            times,
            link,
            seconds,
        });
        seconds
    }
}
