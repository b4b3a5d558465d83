//! One rank works, the others wait with patience. A collective has a deadline, and writing a checkpoint may well
//! take longer; so nobody waits in one long call: while the first rank works, all of them meet again and again,
//! and each meeting says whether there will be another. Never leaves anybody waiting: what fails for one fails
//! for all.

use std::fmt::Display;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use lockstep_comm::{Group, Op};

use crate::Error;

/// Has the group's first rank do `work`, for however long: gives it the result, and the others nothing, when it
/// is done. An error comes to all ranks: the first has its own, the others its text.
///
/// The work makes no calls on the group, which is busy meanwhile.
pub fn on_rank_zero<R, E: Display + From<Error>>(
    group: &Group,
    work: impl FnOnce() -> Result<R, E>,
) -> Result<Option<R>, E> {
    if group.rank() != 0 {
        return wait(group).map(|()| None).map_err(E::from);
    }
    std::thread::scope(|scope| {
        let (end, ended) = channel();
        let meetings = scope.spawn(move || meet(group, &ended));
        let result = work();
        // With all its causes, where it has several. Nobody listens any more if a meeting has failed.
        let _ = end.send(result.as_ref().err().map(|error| format!("{error:#}")));
        let met = meetings.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let result = result?;
        met?;
        Ok(Some(result))
    })
}

// What a meeting says, beside the length of an error's text that follows. They are combined by the largest: only
// the first rank has something to say.
const BUSY: i64 = 0;
const DONE: i64 = 1;
const FAILED: i64 = 2;

/// The first rank's meetings, until it hears how the work ended.
fn meet(group: &Group, ended: &Receiver<Option<String>>) -> Result<(), Error> {
    let pause = Duration::from_secs(1).min(group.timeout() / 4);
    let text = loop {
        match ended.recv_timeout(pause) {
            Err(RecvTimeoutError::Timeout) => group.all_reduce(&mut [BUSY, 0], Op::Max)?,
            Ok(None) => return Ok(group.all_reduce(&mut [DONE, 0], Op::Max)?),
            Ok(Some(text)) => break text,
            // The work panicked. The world breaks as this rank leaves it, and that ends the others' waiting.
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    };
    group.all_reduce(&mut [FAILED, text.len() as i64], Op::Max)?;
    Ok(group.broadcast(&mut text.into_bytes(), 0)?)
}

/// The others' meetings, until they hear how the work ended.
fn wait(group: &Group) -> Result<(), Error> {
    loop {
        let mut word = [BUSY, 0];
        group.all_reduce(&mut word, Op::Max)?;
        match word {
            [FAILED, len] => {
                let mut text = vec![0; len as usize];
                group.broadcast(&mut text, 0)?;
                let what = String::from_utf8_lossy(&text).into_owned();
                return Err(Error::Elsewhere { rank: group.members()[0], what });
            }
            [DONE, _] => return Ok(()),
            _ => {}
        }
    }
}
