//! The connections that have not proven themselves yet, oldest first, and never more than a limit.
//! Never holds one that has: what is in here may be closed at any time.
//!
//! A newcomer over the limit pushes out the oldest. To turn the newcomer away instead would let
//! anyone lock the job's ranks out with a handful of silent connections, opened again each time
//! their deadline passes. As it is, a silent connection only hastens the end of another, while a
//! real peer is in here for one round trip: to push it out, a flood must bring `limit` new
//! connections within that time, and then it dials again.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) struct Pending {
    limit: usize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    next: u64,
    waiting: VecDeque<(u64, Arc<TcpStream>)>,
}

impl Pending {
    pub fn new(limit: usize) -> Pending {
        assert!(limit > 0, "a listener has room for one handshake at least");
        Pending { limit, queue: Mutex::default() }
    }

    /// Takes a connection in and returns its ticket, closing the oldest one if there is no room.
    pub fn enter(&self, stream: &Arc<TcpStream>) -> u64 {
        let mut queue = self.lock();
        if queue.waiting.len() >= self.limit
            && let Some((_, oldest)) = queue.waiting.pop_front()
        {
            close(&oldest);
        }
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push_back((ticket, Arc::clone(stream)));
        ticket
    }

    /// Takes a connection out again. `false` if it was closed in the meantime.
    pub fn leave(&self, ticket: u64) -> bool {
        let mut queue = self.lock();
        // Tickets are handed out in order and never moved.
        let place = queue.waiting.binary_search_by_key(&ticket, |entry| entry.0).ok();
        place.and_then(|at| queue.waiting.remove(at)).is_some()
    }

    /// Closes all that wait.
    pub fn close_all(&self) {
        for (_, stream) in self.lock().waiting.drain(..) {
            close(&stream);
        }
    }

    // No step above leaves the queue half changed, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the thread that reads from the stream. It may be closed already, which is as good.
fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}
