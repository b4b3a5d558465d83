//! Connections that are not yet authenticated, oldest first, up to a limit. Any of them may be closed at any
//! time.
//!
//! A new connection over the limit drops the oldest. Rejecting the new one instead would let anyone lock out
//! the job's ranks with a few silent connections, reopened whenever their timeout expires. A real peer is
//! pending for one round trip only: to drop it, an attacker must open `limit` connections within that time,
//! and the peer then retries.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(super) struct PendingHandshakes {
    limit: usize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    next: u64,
    waiting: VecDeque<(u64, Arc<TcpStream>)>,
}

impl PendingHandshakes {
    pub fn new(limit: usize) -> PendingHandshakes {
        assert!(limit > 0, "the limit must be at least 1");
        PendingHandshakes { limit, queue: Mutex::default() }
    }

    /// Adds a connection and returns its ticket; closes the oldest one over the limit.
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

    /// Removes a connection; `false` if it was closed in the meantime.
    pub fn leave(&self, ticket: u64) -> bool {
        let mut queue = self.lock();
        // Tickets are increasing.
        let place = queue.waiting.binary_search_by_key(&ticket, |entry| entry.0).ok();
        place.and_then(|at| queue.waiting.remove(at)).is_some()
    }

    /// Closes all connections.
    pub fn close_all(&self) {
        for (_, stream) in self.lock().waiting.drain(..) {
            close(&stream);
        }
    }

    // The queue is consistent after every statement, so a poisoned lock can be used.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the thread that reads from the stream. Fails if it is already closed.
fn close(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}
