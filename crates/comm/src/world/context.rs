//! State that all groups of a rank share: its rank, the board, sockets, local access and the recorder.

use crate::algo::choose::LinkCosts;
use crate::health::board::Board;
use crate::health::recorder::Recorder;
use crate::health::watch::{Caller, SpinPolicy};
use crate::lane::LocalAccess;
use crate::link::sockets::Sockets;
use lockstep_types::trace::Tracer;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub(crate) struct Context {
    pub rank: usize,
    /// Host number of every world rank.
    pub hosts: Vec<usize>,
    pub board: Arc<Board>,
    pub timeout: Duration,
    pub spin_policy: SpinPolicy,
    pub sockets: Option<Arc<Sockets>>,
    pub recorder: Recorder,
    /// Records spans of calls while it is on.
    pub tracer: Tracer,
    pub access: LocalAccess,
    /// Set once, when the world starts.
    pub measured: OnceLock<LinkCosts>,
}

impl Context {
    pub(crate) fn link_costs(&self) -> LinkCosts {
        self.measured.get().copied().unwrap_or_default()
    }

    pub(crate) fn caller(&self) -> Caller {
        Caller { board: self.board.clone(), rank: self.rank, timeout: self.timeout }
    }
}
