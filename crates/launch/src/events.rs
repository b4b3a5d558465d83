//! What a supervising launcher waits for, gathered in one channel: ends of ranks and signals to
//! itself. Never acts on any of it.

use std::io::{self, PipeWriter};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::ending::Ending;
use super::sys::{self, HeldSignals};

pub(crate) enum Event {
    /// A rank of this node ended. It is not reaped yet.
    Exited { generation: u32, local_rank: usize, ending: Ending, at: Instant },
    /// Somebody signalled the launcher to end.
    Signalled(i32),
    /// The job's captain has a word for this node.
    Told(Order),
}

/// What the launcher of a node is told to do.
pub(crate) enum Order {
    /// Begin a generation.
    Start(Share),
    /// Have the ranks save and stop.
    Stop,
    /// End the ranks: others have failed.
    End,
    /// The job is over, with this exit code and these words.
    Bye { code: i32, text: String },
    /// The captain is out of reach.
    Lost,
}

/// A node's share of one generation.
#[derive(Debug)]
pub(crate) struct Share {
    pub generation: u32,
    pub first_rank: usize,
    /// Which of the node's places get a rank: as many ranks are started.
    pub slots: Vec<usize>,
    /// Ranks of all nodes.
    pub size: usize,
    pub node: usize,
    pub master_addr: String,
    pub master_port: u16,
    /// The socket on which rank 0 awaits the others, if it is one of these.
    pub listener: Option<TcpListener>,
}

/// Reports the child's end, from a thread of its own.
pub(super) fn report_exit(
    pid: u32,
    generation: u32,
    local_rank: usize,
    to: Sender<Event>,
) -> io::Result<()> {
    let wait = move || {
        // It fails only for a child that was given up and reaped; then nobody listens any more.
        if let Ok(ending) = sys::wait_without_reaping(pid) {
            let at = Instant::now();
            let _ = to.send(Event::Exited { generation, local_rank, ending, at });
        }
    };
    thread::Builder::new().name("rank-waiter".into()).spawn(wait)?;
    Ok(())
}

/// Reports signals while it lives; they do their usual work again afterwards.
pub(crate) struct SignalWatch {
    _held: HeldSignals,
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl SignalWatch {
    pub fn start(to: Sender<Event>) -> io::Result<SignalWatch> {
        let held = HeldSignals::hold()?;
        let mut arrived = held.reader()?;
        let (stopped, stop) = io::pipe()?;
        let watch = move || {
            let both = [Some(arrived.as_raw_fd()), Some(stopped.as_raw_fd())];
            // The other end of `stopped` closes when the watch is dropped.
            while let Ok([true, false]) = sys::wait_readable(both) {
                match sys::read_signal(&mut arrived) {
                    Ok(signal) => drop(to.send(Event::Signalled(signal))),
                    Err(_) => break,
                }
            }
        };
        let thread = thread::Builder::new().name("signal-watch".into()).spawn(watch)?;
        Ok(SignalWatch { _held: held, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for SignalWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
