//! Asynchronous checkpoints. A rank copies its state and continues to train while a background thread writes the file.
//! After each step the ranks agree on their progress (`agree.rs`); when all files are written, a thread of rank 0
//! commits the checkpoint. An error fails this checkpoint on all ranks, not the run. Background threads never
//! communicate.
//!
//! ```text
//! step 100   snapshot        training stalls
//! step 101   writing …       each rank writes and syncs its file
//! step 102   all written     parts of the manifest are sent to rank 0
//! step 103   committing …    rank 0: write manifest, rename, sync, prune old checkpoints
//! step 104   saved
//! ```

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockstep_ckpt::{CHUNK, Disk, Head, Keep, Manifest, Position, Retention, Written};
use lockstep_comm::trace::SpanKind;
use lockstep_comm::{Group, Op};
use lockstep_kernels::{Device, Event};
use lockstep_plan::Plan;
use serde_json::Value;

use crate::agree::{Flags, agree, first_error};
use crate::{Error, Rank, Snapshot};

/// Saves the checkpoints of a run on one rank.
pub struct Saver<'a> {
    plan: &'a Plan,
    group: &'a Group,
    folder: PathBuf,
    generation: u64,
    disk: Disk,
    /// Used on rank 0 only.
    retention: Arc<Mutex<Retention>>,
    pending: Option<(Pending, Phase)>,
    /// Memory for the next snapshot: that of the last one, or being allocated before the first.
    spare: BackgroundJob<Snapshot>,
    /// Bytes of this memory.
    snapshot_bytes: u64,
}

/// A checkpoint being saved.
struct Pending {
    head: Head,
    device: Device,
    /// Around the last call that blocked training. A GPU works on the step before while the host is in the call, so the
    /// time that counts is that of the device.
    blocked: [Event; 2],
    /// Time that training was blocked in the calls before; that of the rank where it was longest.
    stall: Duration,
    /// Time to write the files; that of the slowest rank once gathered.
    writing: Duration,
    bytes: u64,
}

impl Pending {
    /// Time of the last call that blocked training. Waits until the device has reached its end.
    fn blocked(&self) -> Duration {
        let [start, end] = &self.blocked;
        end.elapsed_since(start)
    }
}

/// Progress of the checkpoint; the same on all ranks.
enum Phase {
    Writing(BackgroundJob<FinishedWrite>),
    /// Only rank 0 has work to do.
    Committing(BackgroundJob<Committed>),
}

/// Result of the thread that writes a snapshot.
struct FinishedWrite {
    written: Result<Written, WriteError>,
    /// This rank's part of the manifest as rank 0 receives it. Empty on rank 0.
    message: Vec<u8>,
    snapshot: Snapshot,
    writing: Duration,
}

/// Path of the checkpoint and time of the commit.
type Committed = Result<(PathBuf, Duration), WriteError>;

/// Why a file could not be written.
#[derive(Debug)]
struct WriteError {
    text: String,
    /// The disk is full.
    full: bool,
}

impl From<lockstep_ckpt::Error> for WriteError {
    fn from(error: lockstep_ckpt::Error) -> WriteError {
        WriteError { text: error.to_string(), full: error.is_full() }
    }
}

impl From<String> for WriteError {
    fn from(text: String) -> WriteError {
        WriteError { text, full: false }
    }
}

/// A background thread or its result.
struct BackgroundJob<T> {
    thread: Option<JoinHandle<T>>,
    result: Option<T>,
}

/// Outcome of saving a checkpoint.
#[derive(Debug)]
pub enum SaveOutcome {
    Saved(SavedCheckpoint),
    Failed(FailedSave),
}

/// A checkpoint that could not be saved. The previous checkpoint stays valid.
#[derive(Clone, Debug)]
pub struct FailedSave {
    pub step: u64,
    /// The rank that failed.
    pub rank: usize,
    pub what: String,
    /// Steps of older checkpoints that rank 0 removed to make room, if the disk is full.
    pub removed: Vec<u64>,
    /// Time until the save is retried. `None`: training continues without this checkpoint.
    pub retry: Option<Duration>,
}

/// A committed checkpoint.
#[derive(Clone, Debug)]
pub struct SavedCheckpoint {
    pub step: u64,
    pub path: PathBuf,
    /// Bytes of all ranks.
    pub bytes: u64,
    /// Time to write the files, on the slowest rank, and to commit.
    pub time: Duration,
    /// Time that training was blocked, on the rank where it was longest.
    pub stall: Duration,
}

impl<'a> Saver<'a> {
    /// A saver for the run in `folder`. `generation` is the one that trains it.
    pub fn new(
        plan: &'a Plan,
        group: &'a Group,
        folder: &Path,
        generation: u64,
        disk: Disk,
    ) -> Saver<'a> {
        let spare = BackgroundJob::ready(Snapshot::default());
        let checkpoint = &plan.checkpoint;
        let keep = Keep { newest: checkpoint.keep, every: checkpoint.keep_every as u64 };
        let (folder, retention) =
            (folder.to_path_buf(), Arc::new(Mutex::new(Retention::new(keep))));
        let (pending, snapshot_bytes) = (None, 0);
        Saver { plan, group, folder, generation, disk, retention, pending, spare, snapshot_bytes }
    }

    /// Records that this run has loaded the checkpoint of a step, so it is valid.
    pub fn trust(&mut self, step: u64) {
        lock(&self.retention).trust(step);
    }

    /// Allocates the memory of snapshots in the background, so that the first snapshot is as fast as later ones.
    pub fn preallocate(&mut self, rank: &Rank<'_>) {
        let (elements, device) = (rank.snapshot_len(), rank.device.clone());
        let allocate = move || Snapshot::with_capacity(&device, elements);
        self.snapshot_bytes = (elements * size_of::<f32>()) as u64;
        self.spare = spawn("snapshot", allocate, |_| Snapshot::default());
    }

    /// Takes a snapshot of the state after `step` and starts to write it. Waits for a pending checkpoint first and
    /// returns its outcome. Collective.
    pub fn begin(
        &mut self,
        rank: &Rank<'_>,
        step: u64,
        position: Position,
    ) -> Result<Option<SaveOutcome>, Error> {
        let start = rank.device.record();
        let previous = self.finish()?;
        let spare = std::mem::replace(&mut self.spare, BackgroundJob::ready(Snapshot::default()));
        let snapshot_span = self.group.tracer().span(SpanKind::Checkpoint, "snapshot");
        let mut snapshot = rank.snapshot(spare.wait());
        drop(snapshot_span);
        self.snapshot_bytes = snapshot.bytes() as u64;
        let head = Head {
            step,
            generation: self.generation,
            position,
            shape: self.plan.model.clone(),
            plan: serde_json::to_value(self.plan).unwrap_or(Value::Null),
            extra: rank.extra.clone(),
        };
        let (disk, folder, generation) = (self.disk.clone(), self.folder.clone(), self.generation);
        let (writer, tracer) = (self.group.rank(), self.group.tracer().clone());
        let job = move || {
            let _span = tracer.span(SpanKind::Checkpoint, "write checkpoint");
            let start = Instant::now();
            snapshot.complete();
            let written = lockstep_ckpt::begin(&disk, &folder, step, generation)
                .and_then(|partial| write(&disk, &partial, writer, &snapshot));
            let written = written.map_err(WriteError::from);
            let message = match &written {
                Ok(written) if writer != 0 => {
                    serde_json::to_vec(written).expect("maps with string keys become JSON")
                }
                _ => vec![],
            };
            FinishedWrite { written, message, snapshot, writing: start.elapsed() }
        };
        let failed = |error: String| FinishedWrite {
            written: Err(error.into()),
            message: vec![],
            snapshot: Snapshot::default(),
            writing: Duration::ZERO,
        };
        let job = spawn("checkpoint", job, failed);
        let device = rank.device.clone();
        let blocked = [start, device.record()];
        let (stall, writing) = (Duration::ZERO, Duration::ZERO);
        let pending = Pending { head, device, blocked, stall, writing, bytes: 0 };
        self.pending = Some((pending, Phase::Writing(job)));
        Ok(previous)
    }

    /// Bytes of memory that snapshots use on this rank.
    pub fn snapshot_bytes(&self) -> u64 {
        self.snapshot_bytes
    }

    /// Flags of this rank after a step.
    pub fn flags(&mut self) -> Flags {
        let (writing, failed) = match self.pending.as_mut().map(|(_, phase)| phase) {
            None => (false, false),
            Some(Phase::Writing(job)) => match job.poll() {
                None => (true, false),
                Some(job) => (false, job.written.is_err()),
            },
            Some(Phase::Committing(job)) => match job.poll() {
                None => (true, false),
                Some(committed) => (false, committed.is_err()),
            },
        };
        Flags { writing, failed, ..Flags::default() }
    }

    /// Advances the pending checkpoint to the next phase if all ranks have completed the current one. Returns its
    /// outcome if it has ended. `flags` are those that all ranks agreed on. Collective.
    pub fn advance(&mut self, flags: Flags) -> Result<Option<SaveOutcome>, Error> {
        if flags.writing {
            return Ok(None);
        }
        let Some((mut pending, phase)) = self.pending.take() else { return Ok(None) };
        let start = pending.device.record();
        let phase = match phase {
            Phase::Writing(job) => {
                let FinishedWrite { written, message, snapshot, writing } = job.wait();
                self.spare = BackgroundJob::ready(snapshot);
                (pending.writing, pending.stall) = (writing, pending.blocked());
                if flags.failed {
                    return self.failed(pending.head.step, written.err()).map(Some);
                }
                let written = written.expect("no rank has failed");
                let parts = self.gather(&mut pending, written, &message)?;
                Phase::Committing(self.commit(&pending.head, parts))
            }
            Phase::Committing(job) => {
                let committed = job.wait();
                if flags.failed {
                    return self.failed(pending.head.step, committed.err()).map(Some);
                }
                let (path, committing) = committed.expect("no rank has failed");
                let stall = pending.stall + pending.blocked();
                let Pending { head, writing, bytes, .. } = pending;
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
        pending.blocked = [start, pending.device.record()];
        self.pending = Some((pending, phase));
        Ok(None)
    }

    /// Waits for the pending checkpoint and returns its outcome. Collective.
    pub fn finish(&mut self) -> Result<Option<SaveOutcome>, Error> {
        // Repeated short collectives instead of one long wait, which would time out.
        let pause = Duration::from_millis(2).min(self.group.timeout() / 4);
        while self.pending.is_some() {
            let flags = agree(self.group, self.flags())?;
            if let Some(outcome) = self.advance(flags)? {
                return Ok(Some(outcome));
            }
            std::thread::sleep(pause);
        }
        Ok(None)
    }

    /// Gathers the parts of the manifest on rank 0. Sets the total bytes and the longest times on all ranks.
    fn gather(
        &self,
        pending: &mut Pending,
        mine: Written,
        message: &[u8],
    ) -> Result<Vec<Written>, Error> {
        let group = self.group;
        let micros = |time: Duration| time.as_micros() as i64;
        let (stall, writing) = (micros(pending.stall), micros(pending.writing));
        let numbers = [message.len() as i64, mine.file.bytes as i64, stall, writing];
        let mut all = vec![0; numbers.len() * group.size()];
        group.all_gather(&numbers, &mut all)?;
        let all: Vec<&[i64]> = all.chunks_exact(numbers.len()).collect();
        let longest = |at: usize| all.iter().map(|numbers| numbers[at] as u64).max().unwrap_or(0);
        pending.stall = Duration::from_micros(longest(2));
        pending.writing = Duration::from_micros(longest(3));
        pending.bytes = all.iter().map(|numbers| numbers[1] as u64).sum();
        if group.rank() != 0 {
            group.send(message, 0)?;
            return Ok(vec![]);
        }
        let mut parts = vec![mine];
        for (rank, numbers) in all.iter().enumerate().skip(1) {
            let mut theirs = vec![0u8; numbers[0] as usize];
            group.receive(&mut theirs, rank)?;
            let part = serde_json::from_slice(&theirs).map_err(|error| {
                Error::Invalid(format!("rank {rank} sent an invalid manifest part: {error}"))
            })?;
            parts.push(part);
        }
        Ok(parts)
    }

    fn commit(&self, head: &Head, parts: Vec<Written>) -> BackgroundJob<Committed> {
        if self.group.rank() != 0 {
            let path = lockstep_ckpt::folder(&self.folder, head.step);
            return BackgroundJob::ready(Ok((path, Duration::ZERO)));
        }
        let (disk, folder, head) = (self.disk.clone(), self.folder.clone(), head.clone());
        let retention = self.retention.clone();
        let job = move || {
            let (start, step) = (Instant::now(), head.step);
            let path = lockstep_ckpt::commit(&disk, &folder, &Manifest::of(head, CHUNK, parts))?;
            let mut retention = lock(&retention);
            retention.trust(step);
            // The checkpoint is committed even if older ones cannot be removed.
            if let Err(error) = retention.prune(&disk, &folder) {
                tracing::warn!("{error}");
            }
            Ok((path, start.elapsed()))
        };
        spawn("commit", job, |error| Err(error.into()))
    }

    /// Shares the error with all ranks and removes the partial checkpoint and, if the disk is full, the one that it
    /// would displace. Collective.
    fn failed(&self, step: u64, mine: Option<WriteError>) -> Result<SaveOutcome, Error> {
        let mut full = [i64::from(mine.as_ref().is_some_and(|error| error.full))];
        self.group.all_reduce(&mut full, Op::Max)?;
        let error = first_error(self.group, mine.map(|error| error.text))?;
        let (rank, what) = error.expect("a rank has failed");
        let mut removed = vec![];
        if self.group.rank() == 0 {
            let (disk, folder, generation) = (&self.disk, &self.folder, self.generation);
            lockstep_ckpt::abandon(disk, folder, step, generation);
            if full[0] > 0 {
                let made = lock(&self.retention).make_room(disk, folder);
                removed = made.inspect_err(|error| tracing::warn!("{error}")).unwrap_or_default();
            }
        }
        Ok(SaveOutcome::Failed(FailedSave { step, rank, what, removed, retry: None }))
    }
}

/// The retention rule is valid even if a thread panicked while it was applied.
fn lock(retention: &Mutex<Retention>) -> std::sync::MutexGuard<'_, Retention> {
    retention.lock().unwrap_or_else(PoisonError::into_inner)
}

fn write(
    disk: &Disk,
    partial: &Path,
    writer: usize,
    snapshot: &Snapshot,
) -> lockstep_ckpt::Result<Written> {
    let (pieces, mut rest) = (&snapshot.pieces, snapshot.values());
    lockstep_ckpt::write_pieces(disk, partial, writer, pieces, CHUNK, |number| {
        let (piece, tail) = rest.split_at(pieces[number].len());
        rest = tail;
        Ok(Cow::Borrowed(piece))
    })
}

impl<T> BackgroundJob<T> {
    fn ready(result: T) -> BackgroundJob<T> {
        BackgroundJob { thread: None, result: Some(result) }
    }

    /// Result, if the job is done.
    fn poll(&mut self) -> Option<&T> {
        if let Some(thread) = self.thread.take_if(|thread| thread.is_finished()) {
            self.result = Some(join(thread));
        }
        self.result.as_ref()
    }

    fn wait(self) -> T {
        let result = self.result.or_else(|| self.thread.map(join));
        result.expect("a thread or its result")
    }
}

fn join<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Runs `job` on a new thread. If the thread cannot be created, the result is `failed` of the error message.
fn spawn<T: Send + 'static>(
    name: &str,
    job: impl FnOnce() -> T + Send + 'static,
    failed: impl FnOnce(String) -> T,
) -> BackgroundJob<T> {
    match std::thread::Builder::new().name(name.into()).spawn(job) {
        Ok(thread) => BackgroundJob { thread: Some(thread), result: None },
        Err(error) => BackgroundJob::ready(failed(format!("cannot start a thread: {error}"))),
    }
}
