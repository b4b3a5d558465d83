//! Work on rank zero that may take longer than the timeout of a collective, e.g. reading a checkpoint. Meanwhile all
//! ranks repeat a small all-reduce that says whether the work is done. An error or panic of the work ends the wait on
//! all ranks.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use lockstep_comm::{Group, Op};

use crate::Error;

/// Runs `work` on rank zero while the other ranks wait. Returns its result on rank zero and `None` on the others. If
/// the work fails, rank zero returns its error and the others return [`Error::OtherRank`] with its text. Collective.
///
/// `work` must not use `group`.
pub fn on_rank_zero<R, E: Display + From<Error>>(
    group: &Group,
    work: impl FnOnce() -> Result<R, E>,
) -> Result<Option<R>, E> {
    if group.rank() != 0 {
        return wait(group).map(|()| None).map_err(E::from);
    }
    std::thread::scope(|scope| {
        let (sender, receiver) = channel();
        let heartbeat = scope.spawn(move || signal(group, &receiver));
        let result = work();
        // `{:#}` prints the causes of an anyhow error. Sending fails if an all-reduce has failed.
        let _ = sender.send(result.as_ref().err().map(|error| format!("{error:#}")));
        let signaled = heartbeat.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let result = result?;
        signaled?;
        Ok(Some(result))
    })
}

// State of the work, all-reduced with the maximum together with the length of the error text. Only rank zero sends
// anything but zeros.
const BUSY: i64 = 0;
const DONE: i64 = 1;
const FAILED: i64 = 2;

/// Signals the state of the work to the other ranks until it has ended. Runs on rank zero.
fn signal(group: &Group, ended: &Receiver<Option<String>>) -> Result<(), Error> {
    let pause = Duration::from_secs(1).min(group.timeout() / 4);
    let text = loop {
        match ended.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => group.all_reduce(&mut [BUSY, 0], Op::Max)?,
            Ok(None) => return Ok(group.all_reduce(&mut [DONE, 0], Op::Max)?),
            Ok(Some(text)) => break text,
            // The work panicked. This rank leaves the world, which fails the all-reduce of the others.
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    };
    group.all_reduce(&mut [FAILED, text.len() as i64], Op::Max)?;
    Ok(group.broadcast(&mut text.into_bytes(), 0)?)
}

/// Waits until the work of rank zero has ended.
fn wait(group: &Group) -> Result<(), Error> {
    loop {
        let mut state = [BUSY, 0];
        group.all_reduce(&mut state, Op::Max)?;
        match state {
            [FAILED, len] => {
                let mut text = vec![0; len as usize];
                group.broadcast(&mut text, 0)?;
                let what = String::from_utf8_lossy(&text).into_owned();
                return Err(Error::OtherRank { rank: group.members()[0], what });
            }
            [DONE, _] => return Ok(()),
            _ => {}
        }
    }
}
