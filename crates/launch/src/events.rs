//! The events that a launcher waits for, in one channel: exits of ranks, signals to the launcher, orders from the
//! coordinator. Never acts on them.

use std::io::{self, PipeWriter};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::exit::Exit;
use super::sys::{self, BlockedSignals};

pub(crate) enum Event {
    /// A rank of this node exited. It is not reaped yet.
    Exited { generation: u32, local_rank: usize, exit: Exit, at: Instant },
    /// The launcher received a signal that asks it to stop.
    Signalled(i32),
    /// The coordinator of an elastic job sent an order.
    Ordered(Order),
}

/// An order from the coordinator to a node.
pub(crate) enum Order {
    /// Start a generation.
    Start(Assignment),
    /// Ask the ranks to save and stop.
    Stop,
    /// Terminate the ranks, because others have failed.
    Abort,
    /// Exit with this code and message.
    Finish { code: i32, text: String },
    /// The coordinator does not accept this node.
    Refused(String),
    /// The connection to the coordinator is lost.
    Disconnected,
}

/// The ranks of one node in one generation.
#[derive(Debug)]
pub(crate) struct Assignment {
    pub generation: u32,
    pub first_rank: usize,
    /// The node's slots that get a rank.
    pub slots: Vec<usize>,
    /// Number of ranks on all nodes.
    pub size: usize,
    pub node: usize,
    pub master_addr: String,
    pub master_port: u16,
    /// The rendezvous socket, if rank 0 is on this node.
    pub listener: Option<TcpListener>,
}

/// Both ends of the launcher's event channel.
pub(crate) struct Events {
    pub sender: Sender<Event>,
    pub receiver: Receiver<Event>,
}

impl Events {
    pub fn new() -> Events {
        let (sender, receiver) = mpsc::channel();
        Events { sender, receiver }
    }
}

/// Reports signals as events until dropped; then they have their usual effect again.
pub(crate) struct SignalWatch {
    _blocked: BlockedSignals,
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl SignalWatch {
    pub fn start(to: Sender<Event>) -> io::Result<SignalWatch> {
        let blocked = BlockedSignals::block()?;
        let mut pending = blocked.reader()?;
        let (stopped, stop) = io::pipe()?;
        let watch = move || {
            let both = [Some(pending.as_raw_fd()), Some(stopped.as_raw_fd())];
            // The other end of `stopped` closes when the watch is dropped.
            while let Ok([true, false]) = sys::wait_readable(both) {
                match sys::read_signal(&mut pending) {
                    Ok(signal) => drop(to.send(Event::Signalled(signal))),
                    Err(_) => break,
                }
            }
        };
        let thread = thread::Builder::new().name("signal-watch".into()).spawn(watch)?;
        Ok(SignalWatch { _blocked: blocked, stop: Some(stop), thread: Some(thread) })
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
