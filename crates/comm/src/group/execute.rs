//! Execution of a call: validation, choice of the algorithm, turn order, watch and flight recorder.

use crate::algo::choose::{CollectiveShape, candidates, choose};
use crate::call::error::{Error, Result};
use crate::call::{Algo, Call};
use crate::group::args::{BufferBytes, CollectiveArgs};
use crate::group::backend::Backend;
use crate::group::{Group, Inner};
use crate::health::watch::{SpinPolicy, Watch};
use lockstep_types::trace::{CallDetail, SpanDetail, SpanGuard, SpanKind};
use lockstep_types::{Collective, Dtype, Element};

/// A validated collective.
struct Prepared<'a> {
    args: CollectiveArgs<'a>,
    dtype: Dtype,
    algo: Algo,
}

impl Group {
    pub(crate) fn check_peer(&self, peer: usize) -> Result<()> {
        if peer < self.size() {
            return Ok(());
        }
        let (name, size) = (self.name(), self.size());
        Err(self.misuse(format!("rank {peer} is out of range: group {name} has {size} ranks")))
    }

    pub(crate) fn misuse(&self, what: String) -> Error {
        Error::Misuse { rank: self.inner.context.rank, what }
    }

    pub(crate) fn run<T: Element>(&self, args: CollectiveArgs) -> Result<()> {
        let prepared = self.prepare(args, T::DTYPE)?;
        let (inner, track) = (&self.inner, &self.inner.track);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, backend| inner.perform(backend, prepared, number, spin))
    }

    /// Checks the arguments and chooses the algorithm.
    fn prepare<'a>(&self, args: CollectiveArgs<'a>, dtype: Dtype) -> Result<Prepared<'a>> {
        let inner = &self.inner;
        let width = dtype.bytes();
        self.check_args(&args, dtype)?;
        let shape = CollectiveShape {
            kind: args.kind(),
            count: args.bytes() / width,
            width,
            root: args.root().unwrap_or(0),
            hosts: &inner.hosts,
        };
        let algo = match self.forced {
            None if inner.engine => Algo::Engine,
            None => inner.choose_algo(&shape),
            Some(algo) => self.check_forced(algo, &shape)?,
        };
        Ok(Prepared { args, dtype, algo })
    }

    /// Fails if the arguments are invalid.
    pub(crate) fn check_args<I: BufferBytes, O: BufferBytes>(
        &self,
        args: &CollectiveArgs<'_, I, O>,
        dtype: Dtype,
    ) -> Result<()> {
        let error = args.find_error(self.rank(), self.size(), dtype.bytes());
        error.map_or(Ok(()), |error| {
            let name = args.kind().name();
            Err(self.misuse(format!("{name} in group {}: {error}", self.name())))
        })
    }

    fn check_forced(&self, algo: Algo, shape: &CollectiveShape) -> Result<Algo> {
        let supported = if self.inner.engine { vec![Algo::Engine] } else { candidates(shape) };
        if supported.contains(&algo) {
            return Ok(algo);
        }
        let names: Vec<_> = supported.iter().map(|a| a.name()).collect();
        Err(self.misuse(format!(
            "algorithm {} does not support {} in group {}; use {}",
            algo.name(),
            shape.kind.name(),
            self.name(),
            names.join(", ")
        )))
    }

    pub(crate) fn send_bytes(&self, dtype: Dtype, bytes: &[u8], to: usize) -> Result<()> {
        let (inner, track) = (&self.inner, &self.inner.messages.to[to]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(dtype, bytes.len(), number);
            let _span = inner.span(&call, "send", Some((inner.me, to)));
            inner.recorded(call, spin, |watch| end.send(&watch, bytes))?;
            inner.count_message(bytes.len());
            Ok(())
        })
    }

    pub(crate) fn receive_bytes(&self, dtype: Dtype, bytes: &mut [u8], from: usize) -> Result<()> {
        let (inner, track) = (&self.inner, &self.inner.messages.from[from]);
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, end| {
            let call = inner.transfer_call(dtype, bytes.len(), number);
            let _span = inner.span(&call, "receive", Some((from, inner.me)));
            inner.recorded(call, spin, |watch| end.receive(&watch, bytes))
        })
    }
}

impl Inner {
    pub(crate) fn spin_policy(&self, background: bool) -> SpinPolicy {
        if background { SpinPolicy::BACKGROUND } else { self.context.spin_policy }
    }

    fn choose_algo(&self, shape: &CollectiveShape) -> Algo {
        // On one host the answer is always the same; skip the lookup.
        if self.hosts.iter().all(|h| *h == 0) && Algo::of(shape.kind).contains(&Algo::Direct) {
            return Algo::Direct;
        }
        let key = (shape.kind, shape.count, shape.width, shape.root);
        let mut choices = self.choices.lock().unwrap_or_else(|e| e.into_inner());
        *choices.entry(key).or_insert_with(|| choose(shape, &self.context.link_costs()))
    }

    fn perform(
        &self,
        backend: &mut Backend,
        prepared: Prepared,
        sequence: u64,
        spin: SpinPolicy,
    ) -> Result<()> {
        let Prepared { args, dtype, algo } = prepared;
        let call = self.collective_call(&args, (algo, dtype), sequence);
        let _span = self.span(&call, call.kind.name(), None);
        let sent = self.recorded(call, spin, |watch| backend.perform(watch, args, algo, dtype))?;
        self.count(sent);
        Ok(())
    }

    /// The call of a point-to-point message.
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

    /// The call of a collective.
    pub(crate) fn collective_call<I: BufferBytes, O: BufferBytes>(
        &self,
        args: &CollectiveArgs<'_, I, O>,
        (algo, dtype): (Algo, Dtype),
        sequence: u64,
    ) -> Call {
        Call {
            kind: args.kind(),
            algo,
            dtype: (args.kind() != Collective::Barrier).then_some(dtype),
            op: args.op(),
            root: args.root(),
            count: (args.bytes() / dtype.bytes()) as u64,
            sequence,
            group: self.id,
        }
    }

    /// Opens the span of a call; `message` is the sender and the receiver of a message.
    pub(crate) fn span(
        &self,
        call: &Call,
        name: &'static str,
        message: Option<(usize, usize)>,
    ) -> SpanGuard<'_> {
        let rank = |member: usize| self.members[member] as u32;
        self.context.tracer.span_with(SpanKind::Call, name, || {
            SpanDetail::Call(CallDetail {
                collective: call.kind,
                algo: call.algo.name(),
                bytes: call.bytes(),
                group: self.name.clone(),
                group_id: self.id,
                members: self.members.len() as u32,
                sequence: call.sequence,
                message: message.map(|(from, to)| (rank(from), rank(to))),
            })
        })
    }

    /// Runs an operation under a watch and records it in the flight recorder.
    pub(crate) fn recorded<R>(
        &self,
        call: Call,
        spin: SpinPolicy,
        operation: impl FnOnce(Watch) -> Result<R>,
    ) -> Result<R> {
        let context = &self.context;
        let number = context.recorder.begin(&call, &self.name);
        let watch = Watch::begin(context.caller(), self.name.clone(), call, spin);
        let result = watch.and_then(operation);
        context.recorder.end(number, result.as_ref().err());
        result
    }
}
