//! Checkpoints beside the training. A rank copies what it writes and goes on; a thread of its own writes the
//! files; after each step all ranks say how far they are (`accord.rs`), and when all have written, the first one's
//! thread commits. What fails, fails that save alone, on all ranks. Never exchanges anything from a thread.
//!
//! ```text
//! step 100   snapshot        ─ the stall
//! step 101   writing …       each rank: its file, synced
//! step 102   all have written: their parts of the manifest go to rank 0
//! step 103   committing …    rank 0: manifest, rename, sync; old checkpoints go
//! step 104   saved
//! ```

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockstep_ckpt::{CHUNK, Disk, Head, Keep, Manifest, Position, Written};
use lockstep_comm::Group;
use lockstep_plan::Plan;
use serde_json::Value;

use crate::agree::{Flags, agree, first_error};
use crate::{Error, Rank, Snapshot};

/// A rank's part in the checkpoints of a run.
pub struct Saver<'a> {
    plan: &'a Plan,
    group: &'a Group,
    folder: PathBuf,
    generation: u64,
    disk: Disk,
    pending: Option<(Pending, Phase)>,
    /// Memory of the last snapshot, for the next; before the first, what makes it.
    spare: BackgroundJob<Snapshot>,
}

/// A save under way.
struct Pending {
    head: Head,
    /// Of the slowest rank.
    writing: Duration,
    stall: Duration,
    bytes: u64,
}

/// How far it is: the same on all ranks.
enum Phase {
    Writing(BackgroundJob<(Result<Written, String>, Snapshot, Duration)>),
    /// Nothing to do here but at the first rank.
    Committing(BackgroundJob<Committed>),
}

/// Where a checkpoint is, and what the commit took; or why it is not.
type Committed = Result<(PathBuf, Duration), String>;

/// What a thread does, and what came of it.
struct BackgroundJob<T> {
    thread: Option<JoinHandle<T>>,
    result: Option<T>,
}

/// How a save came to its end.
#[derive(Debug)]
pub enum SaveOutcome {
    Saved(SavedCheckpoint),
    /// The training goes on, and the checkpoint before stands.
    Failed {
        step: u64,
        /// Whose part failed.
        rank: usize,
        what: String,
    },
}

/// A checkpoint that is there.
#[derive(Clone, Debug)]
pub struct SavedCheckpoint {
    pub step: u64,
    /// At the first rank: where.
    pub path: PathBuf,
    /// Of all ranks.
    pub bytes: u64,
    /// What the files took: the slowest rank's, and the commit.
    pub time: Duration,
    /// For how long the training stood still, on the rank where it was the longest.
    pub stall: Duration,
}

impl<'a> Saver<'a> {
    /// For the run in `folder`, which this `generation` trains. All ranks make one.
    pub fn new(
        plan: &'a Plan,
        group: &'a Group,
        folder: &Path,
        generation: u64,
        disk: Disk,
    ) -> Saver<'a> {
        let spare = BackgroundJob::none(Snapshot::default());
        Saver { plan, group, folder: folder.to_path_buf(), generation, disk, pending: None, spare }
    }

    /// Has the memory of snapshots made by a thread meanwhile, so that the first one finds it as later ones do.
    pub fn make_room(&mut self, rank: &Rank<'_>) {
        let elements = rank.snapshot_len();
        let make = move || Snapshot::with_room(elements);
        self.spare = spawn("snapshot", make, |_| Snapshot::default());
    }

    /// Takes a snapshot of the state after `step` and has it written. All ranks call it after the same step. A save
    /// that is still under way is waited for: how it ended.
    pub fn begin(
        &mut self,
        rank: &Rank<'_>,
        step: u64,
        position: Position,
    ) -> Result<Option<SaveOutcome>, Error> {
        let begun = Instant::now();
        let before = self.finish()?;
        let spare = std::mem::replace(&mut self.spare, BackgroundJob::none(Snapshot::default()));
        let snapshot = rank.snapshot(spare.done());
        let head = Head {
            step,
            generation: self.generation,
            position,
            shape: self.plan.model.clone(),
            plan: serde_json::to_value(self.plan).unwrap_or(Value::Null),
            extra: rank.extra.clone(),
        };
        let (disk, folder, generation) = (self.disk.clone(), self.folder.clone(), self.generation);
        let writer = self.group.rank();
        let work = move || {
            let begun = Instant::now();
            let written = lockstep_ckpt::begin(&disk, &folder, step, generation)
                .and_then(|partial| write(&disk, &partial, writer, &snapshot));
            (written.map_err(|error| error.to_string()), snapshot, begun.elapsed())
        };
        let without = |error| (Err(error), Snapshot::default(), Duration::ZERO);
        let work = spawn("checkpoint", work, without);
        let stall = begun.elapsed();
        let pending = Pending { head, writing: Duration::ZERO, stall, bytes: 0 };
        self.pending = Some((pending, Phase::Writing(work)));
        Ok(before)
    }

    /// What this rank has to say after a step.
    pub fn word(&mut self) -> Flags {
        let (writing, failed) = match self.pending.as_mut().map(|(_, phase)| phase) {
            None => (false, false),
            Some(Phase::Writing(work)) => match work.look() {
                None => (true, false),
                Some((written, ..)) => (false, written.is_err()),
            },
            Some(Phase::Committing(work)) => match work.look() {
                None => (true, false),
                Some(committed) => (false, committed.is_err()),
            },
        };
        Flags { writing, failed, ..Flags::default() }
    }

    /// Does what follows from the word of all ranks. How the save ended, if it did.
    pub fn heard(&mut self, word: Flags) -> Result<Option<SaveOutcome>, Error> {
        if word.writing {
            return Ok(None);
        }
        let Some((mut pending, phase)) = self.pending.take() else { return Ok(None) };
        let begun = Instant::now();
        let phase = match phase {
            Phase::Writing(work) => {
                let (written, snapshot, writing) = work.done();
                self.spare = BackgroundJob::none(snapshot);
                pending.writing = writing;
                if word.failed {
                    return self.failed(pending.head.step, written.err()).map(Some);
                }
                let written = written.expect("nobody has failed");
                let parts = self.gather(&mut pending, &written)?;
                Phase::Committing(self.commit(&pending.head, parts))
            }
            Phase::Committing(work) => {
                let committed = work.done();
                if word.failed {
                    return self.failed(pending.head.step, committed.err()).map(Some);
                }
                let (path, committing) = committed.expect("nobody has failed");
                let Pending { head, writing, stall, bytes } = pending;
                let time = writing + committing;
                return Ok(Some(SaveOutcome::Saved(SavedCheckpoint {
                    step: head.step,
                    path,
                    bytes,
                    time,
                    stall,
                })));
            }
        };
        pending.stall += begun.elapsed();
        self.pending = Some((pending, phase));
        Ok(None)
    }

    /// Waits for a save that is under way, however long: how it ended. All ranks call it.
    pub fn finish(&mut self) -> Result<Option<SaveOutcome>, Error> {
        // Nobody waits in one long call, which would have a deadline: they meet again and again.
        let pause = Duration::from_millis(2).min(self.group.timeout() / 4);
        while self.pending.is_some() {
            let word = agree(self.group, self.word())?;
            if let Some(ended) = self.heard(word)? {
                return Ok(Some(ended));
            }
            std::thread::sleep(pause);
        }
        Ok(None)
    }

    /// What all have written, at the first rank; the longest stall and all bytes, at all.
    fn gather(&self, pending: &mut Pending, mine: &Written) -> Result<Vec<Written>, Error> {
        let group = self.group;
        let text = serde_json::to_vec(mine).expect("maps with string keys become JSON");
        let micros = |time: Duration| time.as_micros() as i64;
        let (stall, writing) = (micros(pending.stall), micros(pending.writing));
        let said = [text.len() as i64, mine.file.bytes as i64, stall, writing];
        let mut all = vec![0; said.len() * group.size()];
        group.all_gather(&said, &mut all)?;
        let all: Vec<&[i64]> = all.chunks_exact(said.len()).collect();
        let longest = |at: usize| all.iter().map(|said| said[at] as u64).max().unwrap_or(0);
        pending.stall = Duration::from_micros(longest(2));
        pending.writing = Duration::from_micros(longest(3));
        pending.bytes = all.iter().map(|said| said[1] as u64).sum();
        if group.rank() != 0 {
            group.send(&text, 0)?;
            return Ok(vec![]);
        }
        let mut parts = vec![mine.clone()];
        for (rank, said) in all.iter().enumerate().skip(1) {
            let mut theirs = vec![0u8; said[0] as usize];
            group.receive(&mut theirs, rank)?;
            let part = serde_json::from_slice(&theirs).map_err(|error| {
                Error::Mistake(format!("rank {rank} does not say what it wrote: {error}"))
            })?;
            parts.push(part);
        }
        Ok(parts)
    }

    fn commit(&self, head: &Head, parts: Vec<Written>) -> BackgroundJob<Committed> {
        if self.group.rank() != 0 {
            let path = lockstep_ckpt::folder(&self.folder, head.step);
            return BackgroundJob::none(Ok((path, Duration::ZERO)));
        }
        let (disk, folder, head) = (self.disk.clone(), self.folder.clone(), head.clone());
        let checkpoint = &self.plan.checkpoint;
        let keep = Keep { newest: checkpoint.keep, every: checkpoint.keep_every as u64 };
        let work = move || {
            let begun = Instant::now();
            let manifest = Manifest::of(head, CHUNK, parts);
            let path = lockstep_ckpt::commit(&disk, &folder, &manifest);
            let path = path.map_err(|error| error.to_string())?;
            // The checkpoint stands, whatever becomes of older ones.
            if let Err(error) = lockstep_ckpt::prune(&disk, &folder, keep) {
                tracing::warn!("{error}");
            }
            Ok((path, begun.elapsed()))
        };
        spawn("commit", work, Err)
    }

    /// All ranks know why; the first one clears away what was written.
    fn failed(&self, step: u64, mine: Option<String>) -> Result<SaveOutcome, Error> {
        let trouble = first_error(self.group, mine)?;
        let (rank, what) = trouble.expect("a rank has said that it failed");
        if self.group.rank() == 0 {
            let (disk, folder, generation) = (&self.disk, &self.folder, self.generation);
            lockstep_ckpt::abandon(disk, folder, step, generation);
        }
        Ok(SaveOutcome::Failed { step, rank, what })
    }
}

fn write(
    disk: &Disk,
    partial: &Path,
    writer: usize,
    snapshot: &Snapshot,
) -> lockstep_ckpt::Result<Written> {
    let Snapshot { pieces, values } = snapshot;
    let mut rest = &values[..];
    lockstep_ckpt::write_pieces(disk, partial, writer, pieces, CHUNK, |number| {
        let (now, later) = rest.split_at(pieces[number].len());
        rest = later;
        Ok(Cow::Borrowed(now))
    })
}

impl<T> BackgroundJob<T> {
    /// Nothing had to be done.
    fn none(result: T) -> BackgroundJob<T> {
        BackgroundJob { thread: None, result: Some(result) }
    }

    /// What came of it, if it is done.
    fn look(&mut self) -> Option<&T> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            self.result = Some(joined(thread));
        }
        self.result.as_ref()
    }

    fn done(self) -> T {
        let result = self.result.or_else(|| self.thread.map(joined));
        result.expect("a thread, or what came of it")
    }
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Where the system has no thread for it, that is what comes of it: a save fails alone.
fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
    without: impl FnOnce(String) -> T,
) -> BackgroundJob<T> {
    match std::thread::Builder::new().name(name.into()).spawn(work) {
        Ok(thread) => BackgroundJob { thread: Some(thread), result: None },
        Err(error) => {
            BackgroundJob::none(without(format!("there is no thread to save with: {error}")))
        }
    }
}
