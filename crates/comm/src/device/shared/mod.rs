//! The engine of ranks that share one GPU: one member enqueues a kernel that reads and writes the buffers of all.
//!
//! A call takes two rounds of a few words between the hosts:
//! 1. Every member records its *ready* fence on its stream and posts the addresses of its buffers. Postings and calls are
//!    compared.
//! 2. Member 0 makes its stream wait for all ready fences, enqueues the work, records its *done* fence and enters a
//!    barrier. The others make their streams wait for the done fence.
//!
//! A stream never waits for something that is not enqueued yet. So ranks cannot deadlock on the GPU, whatever the number
//! of its hardware queues, and a call that fails leaves no stream waiting. A kernel that spins on flags in memory would
//! save the second round, but hangs when not all ranks fit on the GPU.
//!
//! Threads of one process use each other's buffers directly. Processes copy theirs through a staging buffer that member 0
//! opens (CUDA IPC), and wait for each other's fences as IPC events.
//!
//! Contributions are combined in member order in one pass: identical bits on every member and in every run.

mod fences;
pub(crate) mod launch;
mod staging;
pub(crate) mod work;

pub(super) use launch::MAX_MEMBERS;

use super::choice::MemberFacts;
use super::{DeviceArgs, DeviceSlice};
use crate::algo::direct::exchange_words;
use crate::call::error::{Cause, Error, Failure, Result};
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::health::watch::Watch;
use crate::lane::Lane;
use fences::{OwnFences, PeerFences};
use lockstep_cuda::{Address, CudaError, Gpu, Stream};
use lockstep_types::Dtype;
use staging::{PeerStaging, Staging};
use std::sync::{Arc, Mutex, MutexGuard};
use work::{Copy, Posting, Shape, Work, find_count_error, work};

/// The member that enqueues the work.
const LEADER: usize = 0;

/// Words of a message: the address, or the number and name of a staging buffer.
pub(super) type MessageWords = [i64; staging::WORDS];

pub(super) struct Shared {
    gpu: Gpu,
    me: usize,
    own: Arc<OwnFences>,
    /// By member; none for ourselves.
    peers: Vec<Option<PeerFences>>,
    /// None if all members are threads of this process.
    processes: Option<Processes>,
}

/// Staging of members that are processes.
struct Processes {
    own: Mutex<Staging>,
    /// By member: staging of its collectives, opened by the leader.
    peers: Mutex<Vec<PeerStaging>>,
    /// By receiver and by sender: staging of messages.
    sent: Vec<Mutex<Staging>>,
    received: Vec<Mutex<PeerStaging>>,
}

impl Processes {
    fn new(members: usize) -> Processes {
        fn each<T: Default>(members: usize) -> Vec<T> {
            std::iter::repeat_with(T::default).take(members).collect()
        }
        Processes {
            own: Mutex::default(),
            peers: Mutex::new(each(members)),
            sent: each(members),
            received: each(members),
        }
    }
}

impl Shared {
    /// Opens the engine. All members call it.
    pub fn open(group: &Group, gpu: &Gpu, facts: &[MemberFacts]) -> Result<Shared> {
        let (own, peers) = fences::exchange(group, gpu, facts)?;
        let processes = facts.iter().any(|fact| fact.pid != facts[0].pid);
        let processes = processes.then(|| Processes::new(group.size()));
        Ok(Shared { gpu: gpu.clone(), me: group.rank(), own, peers, processes })
    }

    /// Enqueues a collective. `source` is the input of a collective that has one buffer on the host.
    pub fn perform(
        &self,
        lane: &mut Lane,
        stream: &Stream,
        dtype: Dtype,
        source: Option<DeviceSlice>,
        args: &DeviceArgs<'_>,
    ) -> Result<()> {
        let shape = Shape {
            kind: args.kind(),
            op: args.op(),
            root: args.root().unwrap_or(0),
            bytes: args.bytes(),
            width: dtype.bytes(),
        };
        let own = posting(source, args);
        if lane.members.len() == 1 {
            launch::launch(&self.gpu, stream, dtype, &alone(&shape, &own, args));
            return Ok(());
        }
        let staged = match &self.processes {
            Some(processes) if self.me != LEADER => {
                let staged = Staged::copy_in(self, processes, stream, source, args);
                Some(staged.map_err(|error| failed(lane.watch(), &error))?)
            }
            _ => None,
        };
        self.own.ready.record(stream);
        let posted = staged.as_ref().map_or(own, |staged| staged.posting(args));
        let name = staged.as_ref().map_or([0; staging::WORDS], |staged| staged.name);
        let words = [name.to_vec(), posted.words()].concat();
        let rows = exchange_words(lane, &words)?;
        let mut postings: Vec<Posting> =
            rows.iter().map(|row| Posting::from_words(&row[staging::WORDS..])).collect();
        if let Some((from, to, sent, expected)) = find_count_error(&postings) {
            return Err(count_error(lane, [from, to], [sent, expected]));
        }
        if self.me == LEADER {
            let opened = self.open_staging(&rows, &mut postings);
            opened.map_err(|error| failed(lane.watch(), &error))?;
            self.peers.iter().flatten().for_each(|peer| peer.ready().wait(stream));
            launch::launch(&self.gpu, stream, dtype, &work(&shape, &postings));
            self.own.done.record(stream);
        }
        let (slots, watch) = lane.slots();
        if let Err(error) = slots.barrier(watch) {
            // The leader's kernel may be using our buffers, which the caller may free now.
            self.gpu.context.synchronize();
            return Err(error);
        }
        if let Some(leader) = &self.peers[LEADER] {
            leader.done().wait(stream);
        }
        if let (Some(staged), Some(processes)) = (staged, &self.processes) {
            staged.copy_out(self, stream, args);
            lock(&processes.own).used(stream);
        }
        Ok(())
    }

    /// Turns offsets in the staging buffers of other processes into addresses.
    fn open_staging(
        &self,
        rows: &[Vec<u64>],
        postings: &mut [Posting],
    ) -> std::result::Result<(), CudaError> {
        let Some(processes) = &self.processes else { return Ok(()) };
        let mut peers = lock(&processes.peers);
        for (member, posting) in postings.iter_mut().enumerate().filter(|(m, _)| *m != LEADER) {
            let start = peers[member].open(&self.gpu, &rows[member][..staging::WORDS])?;
            posting.input += start;
            posting.output += start;
        }
        Ok(())
    }

    /// Announces that a message to a member may be read, and returns the words that describe it.
    pub fn offer(
        &self,
        watch: &Watch,
        stream: &Stream,
        message: DeviceSlice,
        to: usize,
    ) -> Result<MessageWords> {
        let mut words = [0; staging::WORDS];
        words[0] = message.address();
        if let Some(processes) = self.processes.as_ref().filter(|_| to != self.me) {
            let mut staging = lock(&processes.sent[to]);
            let (at, name) = staging
                .get(&self.gpu, stream, message.bytes())
                .map_err(|error| failed(watch, &error))?;
            self.copy(stream, message.address(), at, message.bytes());
            words = name;
        }
        self.own.sent[to].record(stream);
        Ok(words.map(|word| word as i64))
    }

    /// Later operations of the stream may overwrite a message that the receiver has taken.
    pub fn wait_until_taken(&self, stream: &Stream, to: usize) {
        match &self.peers[to] {
            Some(peer) => peer.taken(self.me).wait(stream),
            None => self.own.taken[to].wait(stream),
        }
        if let Some(processes) = &self.processes {
            lock(&processes.sent[to]).used(stream);
        }
    }

    /// Enqueues the copy of a message.
    pub fn take(
        &self,
        watch: &Watch,
        stream: &Stream,
        words: MessageWords,
        (message, from): (DeviceSlice, usize),
    ) -> Result<()> {
        let words = words.map(|word| word as u64);
        let source = match self.processes.as_ref().filter(|_| from != self.me) {
            None => words[0],
            Some(processes) => lock(&processes.received[from])
                .open(&self.gpu, &words)
                .map_err(|error| failed(watch, &error))?,
        };
        match &self.peers[from] {
            Some(peer) => peer.sent(self.me).wait(stream),
            None => self.own.sent[from].wait(stream),
        }
        self.copy(stream, source, message.address(), message.bytes());
        self.own.taken[from].record(stream);
        Ok(())
    }

    /// Waits for the GPU before buffers are freed after a failure.
    pub fn settle(&self) {
        self.gpu.context.synchronize();
    }

    fn copy(&self, stream: &Stream, source: Address, target: Address, bytes: usize) {
        if bytes > 0 {
            let copies = vec![Copy { source, bytes, targets: vec![target] }];
            launch::launch(&self.gpu, stream, Dtype::U8, &Work::Copy(copies));
        }
    }
}

/// The buffers of a call in a staging buffer: the input at its start, the output behind it.
struct Staged {
    start: Address,
    name: [u64; staging::WORDS],
    output: u64,
}

impl Staged {
    fn copy_in(
        shared: &Shared,
        processes: &Processes,
        stream: &Stream,
        source: Option<DeviceSlice>,
        args: &DeviceArgs<'_>,
    ) -> std::result::Result<Staged, CudaError> {
        let [input, output] = args.buffers();
        let input = source.unwrap_or(input);
        // One buffer on the host is one here.
        let behind = match source {
            Some(_) => 0,
            None => input.bytes().next_multiple_of(256),
        };
        let bytes = (behind + output.bytes()).max(input.bytes()).max(1);
        let (start, name) = lock(&processes.own).get(&shared.gpu, stream, bytes)?;
        shared.copy(stream, input.address(), start, input.bytes());
        Ok(Staged { start, name, output: behind as u64 })
    }

    /// Offsets in the staging buffer.
    fn posting(&self, args: &DeviceArgs<'_>) -> Posting {
        let counts = posting(None, args);
        Posting { input: 0, output: self.output, ..counts }
    }

    fn copy_out(&self, shared: &Shared, stream: &Stream, args: &DeviceArgs<'_>) {
        let [_, output] = args.buffers();
        // Only the root of a reduction has a result.
        if !matches!(args, CollectiveArgs::Reduce { root, .. } if *root != shared.me) {
            shared.copy(stream, self.start + self.output, output.address(), output.bytes());
        }
    }
}

/// Breaks the world: this rank cannot share its buffers.
fn failed(watch: &Watch, error: &CudaError) -> Error {
    let text = format!(
        "rank {} cannot share device memory in {} of group {}: {error}",
        watch.rank, watch.call, watch.group_name
    );
    watch.raise(None, Failure { culprit: watch.rank, cause: Cause::Failed, text })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Our posting of a collective.
fn posting(source: Option<DeviceSlice>, args: &DeviceArgs<'_>) -> Posting {
    let [input, output] = args.buffers();
    let (sent, received) = match args {
        CollectiveArgs::AllToAllV { sent, received, .. } => (sent.to_vec(), received.to_vec()),
        _ => (vec![], vec![]),
    };
    let input = source.unwrap_or(input);
    Posting { input: input.address(), output: output.address(), sent, received }
}

/// The work of a group of one: a copy, unless the collective is in place.
fn alone(shape: &Shape, own: &Posting, args: &DeviceArgs<'_>) -> Work {
    let bytes = match args {
        CollectiveArgs::AllToAllV { input, .. } => input.bytes(),
        _ => shape.bytes,
    };
    let moves = bytes > 0 && own.input != own.output;
    let copy = || Copy { source: own.input, bytes, targets: vec![own.output] };
    Work::Copy(moves.then(copy).into_iter().collect())
}

fn count_error(lane: &Lane, [from, to]: [usize; 2], [sent, expected]: [usize; 2]) -> Error {
    let (sender, receiver) = (lane.members[from], lane.members[to]);
    let theirs =
        format!("the same, but sends {sent} elements to rank {receiver}, which expects {expected}");
    lane.watch().disagreement(sender, &theirs)
}
