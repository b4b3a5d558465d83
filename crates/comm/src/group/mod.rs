//! A group: some ranks of a world, in an order, that call collectives together.
//!
//! All members make the same calls in the same order. Calls of one group happen one after the other;
//! different groups are independent of each other and may be used from different threads at the same
//! time. Every call has a `start_…` form that takes its buffers, goes on in the background and gives
//! them back from `wait`.

pub(crate) mod carrier;
pub(crate) mod lane;
mod made;
pub(crate) mod split;
pub(crate) mod started;
pub(crate) mod track;
pub(crate) mod work;

pub(crate) use made::renumbered;

use crate::call::choose::{Constants, Shape, candidates, choose};
use crate::call::cost::Traffic;
use crate::call::error::{Error, Result};
use crate::call::fold::Op;
use crate::call::{Algo, Call};
use crate::group::carrier::Carrier;
use crate::group::track::Track;
use crate::group::work::Work;
use crate::health::watch::{Patience, Watch};
use crate::link::messages::Messages;
use crate::memory::symmetric::Registry;
use crate::world::context::Context;
use lockstep_types::Collective;
use lockstep_types::{Dtype, Element, bytes_of, bytes_of_mut};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Ranks that call collectives together. Cheap to clone; clones are the same group.
#[derive(Clone)]
pub struct Group {
    pub(crate) inner: Arc<Inner>,
    forced: Option<Algo>,
}

pub(crate) struct Inner {
    pub context: Arc<Context>,
    pub id: u64,
    pub name: Arc<str>,
    /// World ranks of the members.
    pub members: Arc<[usize]>,
    pub me: usize,
    pub hosts: Arc<[usize]>,
    pub track: Arc<Track<Carrier>>,
    /// Whether an engine carries out the calls (see `carrier`).
    pub engine: bool,
    pub messages: Messages,
    pub registry: Arc<Registry>,
    pub allocations: AtomicU32,
    sent_messages: AtomicU64,
    sent_bytes: AtomicU64,
    /// Choices made before: the formulas need not be evaluated on every call.
    choices: Mutex<HashMap<(Collective, usize, usize, usize), Algo>>,
}

impl Group {
    /// Our index among the members.
    pub fn rank(&self) -> usize {
        self.inner.me
    }

    /// How many members there are.
    pub fn size(&self) -> usize {
        self.inner.members.len()
    }

    /// The world ranks of the members, in order.
    pub fn members(&self) -> &[usize] {
        &self.inner.members
    }

    /// Which host each member is on, numbered from 0 in order of appearance.
    pub fn hosts(&self) -> &[usize] {
        &self.inner.hosts
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How long a call waits for the other members before it fails.
    pub fn timeout(&self) -> Duration {
        self.inner.context.timeout
    }

    /// The same group with the algorithm fixed; `None` goes back to choosing by price. All members
    /// must fix the same one.
    pub fn with_algo(&self, algo: Option<Algo>) -> Group {
        Group { inner: self.inner.clone(), forced: algo }
    }

    /// What this member has sent in this group so far, in collectives and in messages to members;
    /// nothing where an engine (MPI) sends, which does not tell.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            messages: self.inner.sent_messages.load(Ordering::Relaxed),
            bytes: self.inner.sent_bytes.load(Ordering::Relaxed),
        }
    }

    /// Whether members of one host read each other's memory through the kernel where it pays.
    pub fn pulls(&self) -> bool {
        self.inner.context.may_pull.load(Ordering::Relaxed)
    }

    /// Gives up the pages of other processes' memory that in-place calls have touched. They stay where they are, and
    /// are found again when they are reached again; until then they count as their owners' alone. Worth
    /// its price after large buffers that are not exchanged again soon.
    pub fn let_go(&self) {
        if let Some(heaps) = self.inner.context.heaps.get() {
            heaps.let_go();
        }
    }

    /// The constants by which algorithms are chosen.
    pub fn constants(&self) -> Constants {
        self.inner.context.constants()
    }

    /// Combines `buffer` over all members; everybody gets the result.
    ///
    /// ```
    /// # use lockstep_comm::{on_threads, Op};
    /// let sums = on_threads(3, |world| {
    ///     let mut numbers = [world.rank() as f32, 1.0];
    ///     world.all_reduce(&mut numbers, Op::Sum).unwrap();
    ///     numbers
    /// });
    /// assert_eq!(sums, [[3.0, 3.0]; 3]);
    /// ```
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: Op) -> Result<()> {
        self.run::<T>(Work::AllReduce { bytes: bytes_of_mut(buffer), op })
    }

    /// Combines `buffer` over all members at the root; the others' buffers stay as they are.
    pub fn reduce<T: Element>(&self, buffer: &mut [T], op: Op, root: usize) -> Result<()> {
        self.run::<T>(Work::Reduce { bytes: bytes_of_mut(buffer), op, root })
    }

    /// Combines `input` over all members; each gets its share of the result (see [`crate::share`]).
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: Op) -> Result<()> {
        self.run::<T>(Work::ReduceScatter {
            input: bytes_of(input),
            output: bytes_of_mut(output),
            op,
        })
    }

    /// Puts the shares of all members (see [`crate::share`]) together; everybody gets the whole.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run::<T>(Work::AllGather { input: bytes_of(input), output: bytes_of_mut(output) })
    }

    /// Everybody gets the root's buffer.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.run::<T>(Work::Broadcast { bytes: bytes_of_mut(buffer), root })
    }

    /// The inputs of all members, side by side, at the root. Elsewhere `output` is not touched and
    /// may be empty.
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        let output = if self.rank() == root { output } else { &mut [] };
        self.run::<T>(Work::Gather { input: bytes_of(input), output: bytes_of_mut(output), root })
    }

    /// Each member gets its piece of the root's input. Elsewhere `input` is not read and may be empty.
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<()> {
        let input = if self.rank() == root { input } else { &[] };
        self.run::<T>(Work::Scatter { input: bytes_of(input), output: bytes_of_mut(output), root })
    }

    /// Piece q of `input` goes to member q, and piece p of `output` comes from member p.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.run::<T>(Work::AllToAll { input: bytes_of(input), output: bytes_of_mut(output) })
    }

    /// Like [`Group::all_to_all`] with pieces of different lengths, side by side in both buffers:
    /// `sent[q]` elements go to member q, `received[p]` come from member p.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        sent: &[usize],
        output: &mut [T],
        received: &[usize],
    ) -> Result<()> {
        self.run::<T>(Work::AllToAllV {
            input: bytes_of(input),
            sent: sent.into(),
            output: bytes_of_mut(output),
            received: received.into(),
        })
    }

    /// Returns when all members have come here.
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(Work::Barrier)
    }

    /// Sends `buffer` to a member, which must receive as many elements. Messages from one member to
    /// another arrive in order; they are independent of collectives.
    pub fn send<T: Element>(&self, buffer: &[T], to: usize) -> Result<()> {
        self.check_peer(to)?;
        self.send_bytes(T::DTYPE, bytes_of(buffer), to)
    }

    /// Receives into `buffer` from a member.
    pub fn receive<T: Element>(&self, buffer: &mut [T], from: usize) -> Result<()> {
        self.check_peer(from)?;
        self.receive_bytes(T::DTYPE, bytes_of_mut(buffer), from)
    }

    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        if peer < self.size() {
            return Ok(());
        }
        let what =
            format!("member {peer} is none of the {} members of {}", self.size(), self.name());
        Err(Error::Misuse { rank: self.inner.context.rank, what })
    }

    pub(crate) fn run<T: Element>(&self, work: Work) -> Result<()> {
        let algo = self.prepare(&work, T::DTYPE)?;
        let track = &self.inner.track;
        let patience = self.patience(track.in_background());
        track.run(|number, carrier| {
            self.inner.carry(carrier, work, T::DTYPE, algo, number, patience)
        })
    }

    fn patience(&self, background: bool) -> Patience {
        if background { Patience::BACKGROUND } else { self.inner.context.patience }
    }

    /// Checks the arguments and decides how to do it.
    fn prepare(&self, work: &Work, dtype: Dtype) -> Result<Algo> {
        let inner = &self.inner;
        let width = dtype.bytes();
        if let Some(what) = work.mistake(inner.me, self.size(), width) {
            let what = format!("{} in group {}: {what}", work.kind().name(), inner.name);
            return Err(Error::Misuse { rank: inner.context.rank, what });
        }
        if inner.engine {
            return self.leave_to_engine(work.kind());
        }
        let shape = Shape {
            kind: work.kind(),
            count: work.bytes() / width,
            width,
            root: work.root().unwrap_or(0),
            hosts: &inner.hosts,
        };
        match self.forced {
            None => Ok(inner.choice(&shape)),
            Some(algo) if candidates(&shape).contains(&algo) => Ok(algo),
            Some(algo) => {
                let names: Vec<_> = candidates(&shape).iter().map(|a| a.name()).collect();
                let what = format!(
                    "{} cannot do {} in group {}; possible here: {}",
                    algo.name(),
                    shape.kind.name(),
                    inner.name,
                    names.join(", ")
                );
                Err(Error::Misuse { rank: inner.context.rank, what })
            }
        }
    }

    /// An engine chooses by itself; no other algorithm can be had of it.
    fn leave_to_engine(&self, kind: Collective) -> Result<Algo> {
        match self.forced {
            None | Some(Algo::Engine) => Ok(Algo::Engine),
            Some(algo) => {
                let what = format!(
                    "{} cannot do {} in group {}, whose engine chooses by itself; possible here: {}",
                    algo.name(),
                    kind.name(),
                    self.name(),
                    Algo::Engine.name()
                );
                Err(Error::Misuse { rank: self.inner.context.rank, what })
            }
        }
    }

    pub(crate) fn send_bytes(&self, dtype: Dtype, bytes: &[u8], to: usize) -> Result<()> {
        let (inner, track) = (&self.inner, &self.inner.messages.to[to]);
        let patience = self.patience(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(dtype, bytes.len(), number);
            inner.recorded(call, patience, |watch| end.send(&watch, bytes))?;
            inner.count_message(bytes.len());
            Ok(())
        })
    }

    pub(crate) fn receive_bytes(&self, dtype: Dtype, bytes: &mut [u8], from: usize) -> Result<()> {
        let (inner, track) = (&self.inner, &self.inner.messages.from[from]);
        let patience = self.patience(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(dtype, bytes.len(), number);
            inner.recorded(call, patience, |watch| end.receive(&watch, bytes))
        })
    }
}

impl Inner {
    fn choice(&self, shape: &Shape) -> Algo {
        // One host has one answer; nothing to look up.
        if self.hosts.iter().all(|h| *h == 0) && Algo::of(shape.kind).contains(&Algo::Direct) {
            return Algo::Direct;
        }
        let key = (shape.kind, shape.count, shape.width, shape.root);
        let mut choices = self.choices.lock().unwrap_or_else(|e| e.into_inner());
        *choices.entry(key).or_insert_with(|| choose(shape, &self.context.constants()))
    }

    /// Carries out a collective, on the record.
    fn carry(
        &self,
        carrier: &mut Carrier,
        work: Work,
        dtype: Dtype,
        algo: Algo,
        sequence: u64,
        patience: Patience,
    ) -> Result<()> {
        let call = Call {
            kind: work.kind(),
            algo,
            dtype: (work.kind() != Collective::Barrier).then_some(dtype),
            op: work.op(),
            root: work.root(),
            count: (work.bytes() / dtype.bytes()) as u64,
            sequence,
            group: self.id,
        };
        let sent =
            self.recorded(call, patience, |watch| carrier.perform(watch, work, algo, dtype))?;
        self.count(sent);
        Ok(())
    }

    fn count(&self, sent: Traffic) {
        self.sent_messages.fetch_add(sent.messages, Ordering::Relaxed);
        self.sent_bytes.fetch_add(sent.bytes, Ordering::Relaxed);
    }

    /// Counts a message to a member that has gone. What an engine does is not counted, in part neither.
    pub(crate) fn count_message(&self, bytes: usize) {
        if !self.engine {
            self.count(Traffic { messages: 1, bytes: bytes as u64 });
        }
    }

    pub(crate) fn transfer_call(&self, dtype: Dtype, bytes: usize, sequence: u64) -> Call {
        Call {
            kind: Collective::SendRecv,
            algo: if self.engine { Algo::Engine } else { Algo::Flat },
            dtype: Some(dtype),
            op: None,
            root: None,
            count: (bytes / dtype.bytes()) as u64,
            sequence,
            group: self.id,
        }
    }

    /// Runs an operation under a watch, and writes it into the flight recorder.
    pub(crate) fn recorded<R>(
        &self,
        call: Call,
        patience: Patience,
        operation: impl FnOnce(Watch) -> Result<R>,
    ) -> Result<R> {
        let context = &self.context;
        let number = context.recorder.begin(&call, &self.name);
        let watch = Watch::begin(
            context.board.clone(),
            context.rank,
            self.name.clone(),
            call,
            context.timeout,
            patience,
        );
        let result = watch.and_then(operation);
        context.recorder.end(number, result.as_ref().err());
        result
    }
}
