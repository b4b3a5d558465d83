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
//! Contributions are combined in member order in one pass: identical bits on every member and in every run.

mod launch;
mod work;

pub(super) use launch::MAX_MEMBERS;

use super::choice::MemberFacts;
use super::{DeviceArgs, DeviceSlice};
use crate::algo::direct::exchange_words;
use crate::call::error::{Error, Result};
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::lane::Lane;
use lockstep_cuda::{Address, CudaError, Fence, Gpu, Stream};
use lockstep_types::Dtype;
use std::sync::Arc;
use work::{Copy, Posting, Shape, Work, find_count_error, work};

/// The member that enqueues the work.
const LEADER: usize = 0;

pub(super) struct Shared {
    gpu: Gpu,
    me: usize,
    /// By member. Fences of this member are recorded, the others are waited for.
    fences: Vec<Arc<MemberFences>>,
}

/// Fences that one member records.
struct MemberFences {
    /// Its buffers of a collective may be used.
    ready: Fence,
    /// The work of a collective is complete; recorded by the leader.
    done: Fence,
    /// By receiver: a message may be read.
    sent: Vec<Fence>,
    /// By sender: a message was read.
    taken: Vec<Fence>,
}

impl MemberFences {
    fn new(gpu: &Gpu, members: usize) -> std::result::Result<MemberFences, CudaError> {
        let fence = || Fence::new(&gpu.context);
        let fences = || (0..members).map(|_| fence()).collect::<std::result::Result<Vec<_>, _>>();
        Ok(MemberFences { ready: fence()?, done: fence()?, sent: fences()?, taken: fences()? })
    }
}

impl Shared {
    /// Opens the engine. All members call it.
    pub fn open(group: &Group, gpu: &Gpu, _facts: &[MemberFacts]) -> Result<Shared> {
        let (me, members) = (group.rank(), group.size());
        let own = MemberFences::new(gpu, members).map_err(|error| group.misuse(error.to_string()))?;
        let fences = exchange_in_process(group, Arc::new(own))?;
        Ok(Shared { gpu: gpu.clone(), me, fences })
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
        self.fences[self.me].ready.record(stream);
        let rows = exchange_words(lane, &own.words())?;
        let postings: Vec<Posting> = rows.iter().map(|row| Posting::from_words(row)).collect();
        if let Some((from, to, sent, expected)) = find_count_error(&postings) {
            return Err(count_error(lane, [from, to], [sent, expected]));
        }
        if self.me == LEADER {
            self.others().for_each(|peer| self.fences[peer].ready.wait(stream));
            launch::launch(&self.gpu, stream, dtype, &work(&shape, &postings));
            self.fences[LEADER].done.record(stream);
        }
        let (slots, watch) = lane.slots();
        if let Err(error) = slots.barrier(watch) {
            // The leader's kernel may be using our buffers, which the caller may free now.
            self.gpu.context.synchronize();
            return Err(error);
        }
        if self.me != LEADER {
            self.fences[LEADER].done.wait(stream);
        }
        Ok(())
    }

    /// Announces that a message to a member may be read, and returns the words that describe it.
    pub fn offer(&self, stream: &Stream, message: DeviceSlice, to: usize) -> [u64; 1] {
        self.fences[self.me].sent[to].record(stream);
        [message.address()]
    }

    /// Later operations of the stream may overwrite a message that the receiver has taken.
    pub fn wait_until_taken(&self, stream: &Stream, to: usize) {
        self.fences[to].taken[self.me].wait(stream);
    }

    /// Enqueues the copy of a message.
    pub fn take(&self, stream: &Stream, words: [u64; 1], message: DeviceSlice, from: usize) {
        self.fences[from].sent[self.me].wait(stream);
        let (source, bytes) = (words[0] as Address, message.bytes());
        let copies = match bytes {
            0 => vec![],
            _ => vec![Copy { source, bytes, targets: vec![message.address()] }],
        };
        launch::launch(&self.gpu, stream, message.dtype(), &Work::Copy(copies));
        self.fences[self.me].taken[from].record(stream);
    }

    /// Waits for the GPU before buffers are freed after a failure.
    pub fn settle(&self) {
        self.gpu.context.synchronize();
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, members) = (self.me, self.fences.len());
        (0..members).filter(move |m| *m != me)
    }
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
    let theirs = format!(
        "the same, but sends {sent} elements to rank {receiver}, which expects {expected}"
    );
    lane.watch().disagreement(sender, &theirs)
}

/// Gives every member the fences of all, which are threads of one process.
fn exchange_in_process(group: &Group, own: Arc<MemberFences>) -> Result<Vec<Arc<MemberFences>>> {
    // A member adds a reference for each of the others, which they take over.
    let others = group.size() - 1;
    (0..others).for_each(|_| std::mem::forget(own.clone()));
    let mut addresses = vec![0i64; group.size()];
    let address = Arc::as_ptr(&own).expose_provenance() as i64;
    group.all_gather(&[address], &mut addresses)?;
    let member = |(m, address): (usize, &i64)| match m == group.rank() {
        true => own.clone(),
        // SAFETY: the member is a thread of this process and has added a reference for us. `own` is the same type.
        false => unsafe {
            Arc::from_raw(std::ptr::with_exposed_provenance(*address as usize))
        },
    };
    Ok(addresses.iter().enumerate().map(member).collect())
}
