//! Waits for the exits of ranks and reports them in the order in which they happened. A thread per rank would report them
//! in the order in which a busy machine schedules the threads, and the launcher would blame the wrong rank.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

use super::events::Event;
use super::sys::{self, Epoll};

pub(super) struct ExitWatch {
    epoll: Epoll,
    ranks: Vec<Watched>, // (local ranks)
}

struct Watched {
    pid: u32,
    /// `None` if the system does not allow process descriptors. Such a rank has its own thread.
    pidfd: Option<OwnedFd>,
}

impl ExitWatch {
    pub fn new() -> io::Result<ExitWatch> {
        Ok(ExitWatch { epoll: Epoll::new()?, ranks: Vec::new() })
    }

    /// Watches the next local rank. Exits are ordered from here on.
    pub fn add(&mut self, pid: u32) -> io::Result<()> {
        let pidfd = match sys::pidfd_open(pid) {
            Ok(pidfd) => Some(pidfd),
            // Old kernels do not have the call, and some containers deny it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => None,
            Err(error) => return Err(error),
        };
        if let Some(pidfd) = &pidfd {
            self.epoll.add_once(pidfd, self.ranks.len() as u64)?;
        }
        self.ranks.push(Watched { pid, pidfd });
        Ok(())
    }

    /// Starts to send an event for each exit.
    pub fn start(self, generation: u32, events: &Sender<Event>) -> io::Result<()> {
        let report = move |local_rank: usize, pid: u32, to: &Sender<Event>| {
            // It fails only for a child that was abandoned and reaped; then nobody receives events any more.
            if let Ok(exit) = sys::wait_without_reaping(pid) {
                let at = Instant::now();
                let _ = to.send(Event::Exited { generation, local_rank, exit, at });
            }
        };
        for (local_rank, Watched { pid, .. }) in
            self.ranks.iter().enumerate().filter(|(_, rank)| rank.pidfd.is_none())
        {
            let (pid, to) = (*pid, events.clone());
            let wait = move || report(local_rank, pid, &to);
            thread::Builder::new().name("rank-waiter".into()).spawn(wait)?;
        }
        let to = events.clone();
        let wait = move || {
            let mut left = self.ranks.iter().filter(|rank| rank.pidfd.is_some()).count();
            while left > 0 {
                let Ok(exited) = self.epoll.wait() else { return };
                left -= exited.len();
                for local_rank in exited {
                    report(local_rank as usize, self.ranks[local_rank as usize].pid, &to);
                }
            }
        };
        thread::Builder::new().name("rank-waiter".into()).spawn(wait)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::sync::mpsc;

    #[test]
    fn exits_are_reported_in_order() {
        let mut watch = ExitWatch::new().unwrap();
        let mut children: Vec<_> = (0..8)
            .map(|_| {
                Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
            })
            .collect();
        children.iter().for_each(|child| watch.add(child.id()).unwrap());
        let order = [5, 2, 7, 0, 1, 6, 3, 4];
        for rank in order {
            drop(children[rank].stdin.take());
            sys::wait_without_reaping(children[rank].id()).unwrap();
        }
        // The watch starts when all have exited, and still knows the order.
        let (sender, receiver) = mpsc::channel();
        watch.start(0, &sender).unwrap();
        let reported: Vec<usize> = (0..8)
            .map(|_| match receiver.recv().unwrap() {
                Event::Exited { local_rank, .. } => local_rank,
                _ => unreachable!("only exits are sent"),
            })
            .collect();
        assert_eq!(reported, order);
        children.iter_mut().for_each(|child| drop(child.wait()));
    }
}
