//! Failure detector: decides which failure to raise and whom to notify when a connection closes, a
//! heartbeat is missing or a rank reports a broken world. Pure: takes events and the time, returns
//! actions; threads and sockets are in `heartbeat`.
//!
//! Rank 0 is connected to all ranks; the others are connected only to rank 0.

use crate::call::error::{Cause, Failure};
use crate::health::board::RankState;
use crate::health::control::{ControlMessage, RankReport};

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Received(usize, ControlMessage),
    /// The connection to a rank is closed.
    Closed(usize),
    /// The board of this host shows that the world is broken.
    Alarm(Failure),
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Action {
    Raise(Failure),
    Send(usize, ControlMessage),
    /// Copy the report of a rank of another host to our board.
    Mirror(usize, RankReport),
}

pub(crate) struct FailureDetector {
    me: usize,
    heartbeat_ms: u64,
    /// Whether the ranks are on several boards.
    several_boards: bool,
    peers: Vec<Peer>,
    broken: Option<Failure>,
}

struct Peer {
    rank: usize,
    /// Name in messages: `rank 2 (process 4711 on node7)`.
    name: String,
    last_message_ms: u64,
    gone: bool,
    report: Option<RankReport>,
}

impl FailureDetector {
    /// `peers` are the ranks that we are connected to: all others on rank 0, rank 0 elsewhere.
    pub(crate) fn new(
        me: usize,
        peers: Vec<(usize, String)>,
        heartbeat_ms: u64,
        several_boards: bool,
        now_ms: u64,
    ) -> FailureDetector {
        let peer =
            |(rank, name)| Peer { rank, name, last_message_ms: now_ms, gone: false, report: None };
        let peers = peers.into_iter().map(peer).collect();
        FailureDetector { me, heartbeat_ms, several_boards, peers, broken: None }
    }

    /// Whether every peer has left or is lost.
    pub(crate) fn all_peers_gone(&self) -> bool {
        self.peers.iter().all(|p| p.gone)
    }

    /// Handles an event; `own` is our own report.
    pub(crate) fn on(&mut self, event: Event, own: &RankReport, now_ms: u64) -> Vec<Action> {
        match event {
            Event::Received(rank, message) => self.received(rank, message, now_ms),
            Event::Closed(rank) => self.closed(rank),
            Event::Alarm(failure) => self.alarm(failure, None),
            Event::Tick => self.tick(own, now_ms),
        }
    }

    fn received(&mut self, rank: usize, message: ControlMessage, now_ms: u64) -> Vec<Action> {
        let Some(peer) = self.peers.iter_mut().find(|p| p.rank == rank) else { return vec![] };
        peer.last_message_ms = now_ms;
        match message {
            ControlMessage::Heartbeat(report) => {
                peer.report = Some(report.clone());
                if self.several_boards { vec![Action::Mirror(rank, report)] } else { vec![] }
            }
            ControlMessage::Reports(reports) => {
                let others = reports.into_iter().enumerate().filter(|(r, _)| *r != self.me);
                others.map(|(r, report)| Action::Mirror(r, report)).collect()
            }
            ControlMessage::Goodbye => {
                peer.gone = true;
                let report = RankReport { state: RankState::Left, calls: vec![] };
                vec![Action::Mirror(rank, report)]
            }
            ControlMessage::Abort(failure) => self.alarm(failure, Some(rank)),
            // Messages of the rendezvous, which is over.
            ControlMessage::Join(_)
            | ControlMessage::Members(_)
            | ControlMessage::Ready(_)
            | ControlMessage::Start(_) => vec![],
        }
    }

    fn closed(&mut self, rank: usize) -> Vec<Action> {
        let Some(peer) = self.peers.iter_mut().find(|p| p.rank == rank && !p.gone) else {
            return vec![];
        };
        peer.gone = true;
        let text = format!("{} died: its connection closed without a goodbye", peer.name);
        self.alarm(Failure { culprit: rank, cause: Cause::Died, text }, None)
    }

    /// Raises the first failure and forwards it to all peers except the one it came from.
    fn alarm(&mut self, failure: Failure, from: Option<usize>) -> Vec<Action> {
        if self.broken.is_some() {
            return vec![];
        }
        self.broken = Some(failure.clone());
        let receivers = self.peers.iter().filter(|p| !p.gone && Some(p.rank) != from);
        let sends = receivers.map(|p| Action::Send(p.rank, ControlMessage::Abort(failure.clone())));
        [Action::Raise(failure.clone())].into_iter().chain(sends).collect()
    }

    fn tick(&mut self, own: &RankReport, now_ms: u64) -> Vec<Action> {
        if self.broken.is_some() {
            return vec![];
        }
        let silent =
            |p: &&Peer| !p.gone && now_ms.saturating_sub(p.last_message_ms) > self.heartbeat_ms;
        if let Some(peer) = self.peers.iter().find(silent) {
            let seconds = (now_ms - peer.last_message_ms) as f64 / 1000.0;
            let text = format!(
                "no heartbeat from {} for {seconds:.1} s: it is stopped, or its host is overloaded or \
                 unreachable",
                peer.name
            );
            return self.alarm(Failure { culprit: peer.rank, cause: Cause::Silent, text }, None);
        }
        let message = self.own_message(own);
        let present = self.peers.iter().filter(|p| !p.gone);
        present.map(|p| Action::Send(p.rank, message.clone())).collect()
    }

    /// Our heartbeat. With several boards, rank 0 sends the reports of all ranks.
    fn own_message(&self, own: &RankReport) -> ControlMessage {
        if self.me != 0 || !self.several_boards {
            return ControlMessage::Heartbeat(own.clone());
        }
        let unknown = RankReport { state: RankState::Running, calls: vec![] };
        let mut reports = vec![unknown; self.peers.len() + 1];
        reports[0] = own.clone();
        for peer in &self.peers {
            if let Some(report) = &peer.report {
                reports[peer.rank] = report.clone();
            }
            if peer.gone {
                reports[peer.rank].state = RankState::Left;
            }
        }
        ControlMessage::Reports(reports)
    }
}

#[cfg(test)]
#[path = "failure_detector_tests.rs"]
mod tests;
