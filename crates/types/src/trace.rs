//! Recorder of spans: what a rank does, and when. Every rank has one and shares it with all crates that do its work.
//! While it is off, a span costs one load. Writes no files; `lockstep-events` does.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::Collective;

/// Class of a span.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// One optimizer step.
    Step,
    /// The pass of one micro-batch through one pipeline stage.
    Pass,
    /// The pass of one block.
    Block,
    /// Activations of a block that are computed again in its backward pass.
    Recompute,
    /// A device operation; the name is its class.
    Kernel,
    /// A collective or a message.
    Call,
    /// Exposed communication; the name is the axis.
    Exposed,
    Optimizer,
    /// Reading samples.
    Data,
    Evaluation,
    /// Snapshots and files of checkpoints.
    Checkpoint,
}

impl SpanKind {
    pub const fn name(self) -> &'static str {
        match self {
            SpanKind::Step => "step",
            SpanKind::Pass => "pass",
            SpanKind::Block => "block",
            SpanKind::Recompute => "recompute",
            SpanKind::Kernel => "kernel",
            SpanKind::Call => "call",
            SpanKind::Exposed => "exposed",
            SpanKind::Optimizer => "optimizer",
            SpanKind::Data => "data",
            SpanKind::Evaluation => "evaluation",
            SpanKind::Checkpoint => "checkpoint",
        }
    }
}

/// The axis that exposed communication belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommAxis {
    /// Gradients, parameters of ZeRO, and the norm.
    Data,
    Tensor,
    Context,
    Expert,
    /// Messages between pipeline stages, with the time that a stage waits for them.
    Pipe,
}

impl CommAxis {
    pub const ALL: [CommAxis; 5] =
        [CommAxis::Data, CommAxis::Tensor, CommAxis::Context, CommAxis::Expert, CommAxis::Pipe];

    pub const fn name(self) -> &'static str {
        match self {
            CommAxis::Data => "data",
            CommAxis::Tensor => "tensor",
            CommAxis::Context => "context",
            CommAxis::Expert => "expert",
            CommAxis::Pipe => "pipe",
        }
    }
}

/// Details of a span, by its kind.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum SpanDetail {
    #[default]
    None,
    Step(u64),
    /// Pipeline stage and micro-batch.
    Pass {
        stage: u32,
        micro: u32,
    },
    /// Index of the block on its rank; stage and micro-batch are added by the recorder.
    Block(u32),
    Call(CallDetail),
    /// A count of bytes.
    Bytes(u64),
}

/// A collective or a message. Members of a collective record the same group and sequence number, and so do the two ends
/// of a message.
#[derive(Clone, PartialEq, Debug)]
pub struct CallDetail {
    pub collective: Collective,
    pub algo: &'static str,
    pub bytes: u64,
    pub group: Arc<str>,
    pub group_id: u64,
    /// Number of members.
    pub members: u32,
    pub sequence: u64,
    /// World ranks of the sender and the receiver of a message.
    pub message: Option<(u32, u32)>,
}

/// Something that a thread did.
#[derive(Clone, PartialEq, Debug)]
pub struct Span {
    pub kind: SpanKind,
    pub name: &'static str,
    pub thread: u32,
    /// Time since the recorder was created.
    pub start: Duration,
    pub duration: Duration,
    pub detail: SpanDetail,
    /// Stage and micro-batch in which a block ran.
    pub place: (u32, u32),
}

/// Bytes of memory by tag, at a time.
#[derive(Clone, PartialEq, Debug)]
pub struct MemorySample {
    pub at: Duration,
    pub bytes: Vec<u64>,
}

/// Everything that was recorded since the recorder was switched on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Recorded {
    pub spans: Vec<Span>,
    pub memory: Vec<MemorySample>,
    /// Names of threads by number.
    pub threads: Vec<(u32, String)>,
    /// Spans that were not recorded because there were too many.
    pub dropped: u64,
}

/// Spans that are recorded at most, about 500 MB.
const MOST_SPANS: usize = 4_000_000;

/// Recorder of one rank. Clones are the same recorder.
///
/// ```
/// use lockstep_types::trace::{SpanKind, Tracer};
/// let tracer = Tracer::default();
/// drop(tracer.span(SpanKind::Data, "read samples"));
/// assert!(tracer.take().spans.is_empty()); // off
/// tracer.switch(true);
/// drop(tracer.span(SpanKind::Data, "read samples"));
/// assert_eq!(tracer.take().spans[0].name, "read samples");
/// ```
#[derive(Clone)]
pub struct Tracer(Arc<Inner>);

struct Inner {
    on: AtomicBool,
    epoch: Instant,
    /// Stage and micro-batch of the pass in progress.
    place: AtomicU64,
    recorded: Mutex<Recorded>,
}

impl Default for Tracer {
    fn default() -> Tracer {
        Tracer(Arc::new(Inner {
            on: AtomicBool::new(false),
            epoch: Instant::now(),
            place: AtomicU64::new(0),
            recorded: Mutex::default(),
        }))
    }
}

impl Tracer {
    pub fn is_on(&self) -> bool {
        self.0.on.load(Relaxed)
    }

    /// Switches recording on or off. Keeps what was recorded.
    pub fn switch(&self, on: bool) {
        self.0.on.store(on, Relaxed);
    }

    /// Time since the recorder was created.
    pub fn now(&self) -> Duration {
        self.0.epoch.elapsed()
    }

    /// Removes and returns everything that was recorded.
    pub fn take(&self) -> Recorded {
        std::mem::take(&mut *self.recorded())
    }

    /// Starts a span that ends when the returned guard is dropped.
    pub fn span(&self, kind: SpanKind, name: &'static str) -> SpanGuard<'_> {
        self.span_with(kind, name, || SpanDetail::None)
    }

    /// Starts a span with a detail, which is only computed while the recorder is on.
    pub fn span_with(
        &self,
        kind: SpanKind,
        name: &'static str,
        detail: impl FnOnce() -> SpanDetail,
    ) -> SpanGuard<'_> {
        let open = self.is_on().then(|| (Instant::now(), detail()));
        SpanGuard { tracer: self, kind, name, open }
    }

    /// Starts the pass of a micro-batch: blocks belong to this stage and micro-batch from now on.
    pub fn pass(&self, name: &'static str, stage: usize, micro: usize) -> SpanGuard<'_> {
        let (stage, micro) = (stage as u32, micro as u32);
        if self.is_on() {
            self.0.place.store(u64::from(stage) << 32 | u64::from(micro), Relaxed);
        }
        self.span_with(SpanKind::Pass, name, || SpanDetail::Pass { stage, micro })
    }

    /// Starts the pass of a block.
    pub fn block(&self, kind: SpanKind, name: &'static str, block: usize) -> SpanGuard<'_> {
        self.span_with(kind, name, || SpanDetail::Block(block as u32))
    }

    /// Records a span that ends now and took `duration`.
    pub fn ended(&self, kind: SpanKind, name: &'static str, duration: Duration) {
        if self.is_on() {
            let start = self.now().saturating_sub(duration);
            self.add(kind, name, (start, duration), SpanDetail::None);
        }
    }

    /// Records a span with the start and the duration that the caller measured.
    pub fn measured(&self, kind: SpanKind, name: &'static str, start: Instant, duration: Duration) {
        if self.is_on() {
            let since = start.saturating_duration_since(self.0.epoch);
            self.add(kind, name, (since, duration), SpanDetail::None);
        }
    }

    /// Records the bytes of memory by tag.
    pub fn memory(&self, bytes: impl FnOnce() -> Vec<u64>) {
        if self.is_on() {
            let sample = MemorySample { at: self.now(), bytes: bytes() };
            self.recorded().memory.push(sample);
        }
    }

    fn add(
        &self,
        kind: SpanKind,
        name: &'static str,
        (start, duration): (Duration, Duration),
        detail: SpanDetail,
    ) {
        let place = self.0.place.load(Relaxed);
        let place = ((place >> 32) as u32, place as u32);
        let thread = thread_number();
        let mut recorded = self.recorded();
        if recorded.spans.len() >= MOST_SPANS {
            recorded.dropped += 1;
            return;
        }
        if !recorded.threads.iter().any(|(number, _)| *number == thread) {
            let name = std::thread::current().name().unwrap_or("rank").to_string();
            recorded.threads.push((thread, name));
        }
        recorded.spans.push(Span { kind, name, thread, start, duration, detail, place });
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.0.recorded.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A span that is open until it is dropped.
#[must_use = "the span ends when the guard is dropped"]
pub struct SpanGuard<'a> {
    tracer: &'a Tracer,
    kind: SpanKind,
    name: &'static str,
    /// None while the recorder is off.
    open: Option<(Instant, SpanDetail)>,
}

impl Drop for SpanGuard<'_> {
    fn drop(&mut self) {
        if let Some((start, detail)) = self.open.take() {
            let since = start.saturating_duration_since(self.tracer.0.epoch);
            self.tracer.add(self.kind, self.name, (since, start.elapsed()), detail);
        }
    }
}

/// Number of the calling thread, unique in this process.
fn thread_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_nest_and_carry_their_place() {
        let tracer = Tracer::default();
        tracer.switch(true);
        {
            let _pass = tracer.pass("forward", 1, 3);
            drop(tracer.block(SpanKind::Block, "forward", 7));
        }
        tracer.memory(|| vec![1, 2]);
        tracer.switch(false);
        drop(tracer.span(SpanKind::Data, "not recorded"));
        let Recorded { spans, memory, threads, dropped } = tracer.take();
        let [block, pass] = &spans[..] else { panic!("{spans:?}") };
        assert_eq!((&block.detail, block.place), (&SpanDetail::Block(7), (1, 3)));
        assert_eq!(pass.detail, SpanDetail::Pass { stage: 1, micro: 3 });
        assert!(pass.start <= block.start);
        assert!(block.start + block.duration <= pass.start + pass.duration);
        assert_eq!((memory[0].bytes.as_slice(), threads.len(), dropped), (&[1, 2][..], 1, 0));
    }

    #[test]
    fn threads_have_their_own_numbers_and_names() {
        let tracer = Tracer::default();
        tracer.switch(true);
        drop(tracer.span(SpanKind::Data, "here"));
        let other = tracer.clone();
        let thread = std::thread::Builder::new().name("writer".into());
        let work = move || drop(other.span(SpanKind::Checkpoint, "there"));
        thread.spawn(work).unwrap().join().unwrap();
        let Recorded { spans, threads, .. } = tracer.take();
        assert_ne!(spans[0].thread, spans[1].thread);
        assert!(threads.contains(&(spans[1].thread, "writer".into())), "{threads:?}");
    }
}
