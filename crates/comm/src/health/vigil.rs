//! Watching over the ranks: when a connection closes, a heartbeat fails or a rank says that the world
//! is broken, what to believe and whom to tell. Pure: takes events and the time, returns acts; the
//! threads and sockets are in `pulse`.
//!
//! Rank 0 hears all ranks and tells them; the others hear only rank 0.

use crate::call::error::{Cause, Failure};
use crate::health::board::{Doing, State};
use crate::health::word::Word;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Heard(usize, Word),
    /// The connection with a rank is closed.
    Closed(usize),
    /// The board of this host shows that the world is broken.
    Alarm(Failure),
    Tick,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Act {
    Raise(Failure),
    Tell(usize, Word),
    /// Put on our board what a rank of another host said of itself.
    Mirror(usize, State, Vec<Doing>),
}

pub(crate) struct Vigil {
    me: usize,
    heartbeat_ms: u64,
    /// Whether ranks cannot all see the same board.
    spread: bool,
    peers: Vec<Peer>,
    broken: Option<Failure>,
}

struct Peer {
    rank: usize,
    /// How the rank is called in messages: `rank 2 (process 4711 on node7)`.
    name: String,
    heard_ms: u64,
    gone: bool,
    said: Option<(State, Vec<Doing>)>,
}

impl Vigil {
    /// `peers` are the ranks we have a connection with: all others for rank 0, rank 0 for them.
    pub(crate) fn new(
        me: usize,
        peers: Vec<(usize, String)>,
        heartbeat_ms: u64,
        spread: bool,
        now_ms: u64,
    ) -> Vigil {
        let peer = |(rank, name)| Peer { rank, name, heard_ms: now_ms, gone: false, said: None };
        let peers = peers.into_iter().map(peer).collect();
        Vigil { me, heartbeat_ms, spread, peers, broken: None }
    }

    /// Whether every peer has left or is lost.
    pub(crate) fn alone(&self) -> bool {
        self.peers.iter().all(|p| p.gone)
    }

    /// `own` is what we would say of ourselves.
    pub(crate) fn on(&mut self, event: Event, own: &(State, Vec<Doing>), now_ms: u64) -> Vec<Act> {
        match event {
            Event::Heard(rank, word) => self.heard(rank, word, now_ms),
            Event::Closed(rank) => self.closed(rank),
            Event::Alarm(failure) => self.alarm(failure, None),
            Event::Tick => self.tick(own, now_ms),
        }
    }

    fn heard(&mut self, rank: usize, word: Word, now_ms: u64) -> Vec<Act> {
        let Some(peer) = self.peers.iter_mut().find(|p| p.rank == rank) else { return vec![] };
        peer.heard_ms = now_ms;
        match word {
            Word::Beat { state, doing } => {
                peer.said = Some((state, doing.clone()));
                if self.spread { vec![Act::Mirror(rank, state, doing)] } else { vec![] }
            }
            Word::Table(ranks) => {
                let others = ranks.into_iter().enumerate().filter(|(r, _)| *r != self.me);
                others.map(|(r, (state, doing))| Act::Mirror(r, state, doing)).collect()
            }
            Word::Goodbye => {
                peer.gone = true;
                vec![Act::Mirror(rank, State::Left, vec![])]
            }
            Word::Abort(failure) => self.alarm(failure, Some(rank)),
            // Words of the rendezvous, which is over: of no meaning here.
            Word::Join(_) | Word::Roll(_) | Word::Ready(_) | Word::Go(_) => vec![],
        }
    }

    fn closed(&mut self, rank: usize) -> Vec<Act> {
        let Some(peer) = self.peers.iter_mut().find(|p| p.rank == rank && !p.gone) else {
            return vec![];
        };
        peer.gone = true;
        let text = format!("{} died: its connection closed without a goodbye", peer.name);
        self.alarm(Failure { guilty: rank, cause: Cause::Died, text }, None)
    }

    /// The first failure is passed on to everybody but who told us.
    fn alarm(&mut self, failure: Failure, from: Option<usize>) -> Vec<Act> {
        if self.broken.is_some() {
            return vec![];
        }
        self.broken = Some(failure.clone());
        let tell = self.peers.iter().filter(|p| !p.gone && Some(p.rank) != from);
        let tell = tell.map(|p| Act::Tell(p.rank, Word::Abort(failure.clone())));
        [Act::Raise(failure.clone())].into_iter().chain(tell).collect()
    }

    fn tick(&mut self, own: &(State, Vec<Doing>), now_ms: u64) -> Vec<Act> {
        if self.broken.is_some() {
            return vec![];
        }
        let silent = |p: &&Peer| !p.gone && now_ms.saturating_sub(p.heard_ms) > self.heartbeat_ms;
        if let Some(peer) = self.peers.iter().find(silent) {
            let seconds = (now_ms - peer.heard_ms) as f64 / 1000.0;
            let text = format!(
                "{} has given no sign of life for {seconds:.1} s: it is stopped, or its host is \
                 overloaded or unreachable",
                peer.name
            );
            return self.alarm(Failure { guilty: peer.rank, cause: Cause::Silent, text }, None);
        }
        let word = self.own_word(own);
        let present = self.peers.iter().filter(|p| !p.gone);
        present.map(|p| Act::Tell(p.rank, word.clone())).collect()
    }

    /// Rank 0 tells hosts that cannot see each other what everybody is doing; all else is a beat.
    fn own_word(&self, own: &(State, Vec<Doing>)) -> Word {
        if self.me != 0 || !self.spread {
            return Word::Beat { state: own.0, doing: own.1.clone() };
        }
        let mut table = vec![(State::Running, vec![]); self.peers.len() + 1];
        table[0] = own.clone();
        for peer in &self.peers {
            if let Some(said) = &peer.said {
                table[peer.rank] = said.clone();
            }
            if peer.gone {
                table[peer.rank].0 = State::Left;
            }
        }
        Word::Table(table)
    }
}

#[cfg(test)]
#[path = "vigil_tests.rs"]
mod tests;
