//! What all groups of a rank share: who it is, the board, the way to other hosts, the recorder.

use crate::call::choose::Constants;
use crate::health::board::Board;
use crate::health::recorder::Recorder;
use crate::health::watch::Patience;
use crate::link::sockets::Sockets;
use crate::memory::heap::Heaps;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) struct Context {
    pub rank: usize,
    /// Host number of every world rank.
    pub hosts: Vec<usize>,
    pub board: Arc<Board>,
    pub timeout: Duration,
    pub patience: Patience,
    pub sockets: Option<Arc<Sockets>>,
    pub recorder: Recorder,
    /// Whether the ranks of each host use each other's buffers where they lie.
    pub direct_access: Arc<AtomicBool>,
    /// Whether the ranks of each host may read each other's memory; found out when the world starts.
    pub may_pull: Arc<AtomicBool>,
    /// The heaps of this host's ranks, if all can reach all; set when the world starts.
    pub heaps: Arc<OnceLock<Heaps>>,
    /// Set once, when the world starts.
    pub measured: OnceLock<Constants>,
}

impl Context {
    pub(crate) fn constants(&self) -> Constants {
        self.measured.get().copied().unwrap_or_default()
    }
}
