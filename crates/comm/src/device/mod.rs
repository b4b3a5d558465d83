//! Collectives and messages on device memory. The calls are enqueued on the caller's stream: the host exchanges a few
//! bytes with the other ranks and, except with MPI, never waits for a GPU.
//!
//! `choice` picks an engine when a group is opened:
//! - `shared`: all members use one GPU. One of them enqueues a kernel that reads and writes the buffers of all.
//! - `nccl`: NCCL, on its own algorithms.
//! - `mpi`: a CUDA-aware MPI that connects the ranks. Its calls wait for the GPU, as MPI knows no streams.
//! - host: none of these. The caller copies through page-locked memory and uses the [`Group`] itself.
//!
//! Names, sequence numbers, the flight recorder, deadlines and the comparison of calls are those of the [`Group`].

mod choice;
mod messages;
pub(crate) mod shared;
mod slice;

pub use choice::{DeviceOptions, EngineChoice};
pub use slice::DeviceSlice;

use crate::call::Algo;
use crate::call::error::Result;
use crate::call::fold::Op;
use crate::group::Group;
use crate::group::args::CollectiveArgs;
use crate::nccl::api::Api;
use crate::nccl::{Communicator, Nccl};
pub(crate) use choice::dotted;
use choice::{MemberFacts, choose, choose_over_mpi};
use lockstep_cuda::{Gpu, Stream, StreamEvent};
use lockstep_types::{DeviceEngine, Dtype};
use std::sync::{Arc, OnceLock};

/// Arguments of a collective on device memory.
pub(crate) type DeviceArgs<'a> = CollectiveArgs<'a, DeviceSlice, DeviceSlice>;

/// The engine of an opened group.
pub(crate) struct State {
    choice: EngineChoice,
    engine: Engine,
    /// Streams of started messages, by peer: no message waits for one between other ranks.
    sends: Vec<LazyStream>,
    receives: Vec<LazyStream>,
}

/// A stream that is created when it is first needed.
#[derive(Default)]
struct LazyStream(OnceLock<Stream>);

impl LazyStream {
    fn of_each(members: usize) -> Vec<LazyStream> {
        std::iter::repeat_with(LazyStream::default).take(members).collect()
    }

    /// The stream, on the GPU of an event.
    fn get(&self, event: &StreamEvent) -> &Stream {
        self.0.get_or_init(|| Stream::new(event.context().clone()))
    }
}

enum Engine {
    Shared(shared::Shared),
    Nccl(Nccl),
    #[cfg(feature = "mpi")]
    Mpi(Gpu),
    Host,
}

/// A group whose collectives run on device memory.
///
/// Calls are enqueued: buffers are read and written when the stream reaches the call, and operations that are enqueued
/// afterwards on the same stream see the result.
#[derive(Clone)]
pub struct DeviceGroup {
    group: Group,
    state: Arc<State>,
}

impl Group {
    /// Chooses an engine for device memory. All members call it with the same options, each with its GPU, if it has one.
    /// Fails on all members if the wanted engine cannot be used.
    pub fn open_device(
        &self,
        gpu: Option<&Gpu>,
        options: impl Into<DeviceOptions>,
    ) -> Result<EngineChoice> {
        let DeviceOptions { engine: wanted, register } = options.into();
        if let Some(state) = self.inner.device.get() {
            return Ok(state.choice.clone());
        }
        let facts = self.exchange_facts(gpu)?;
        let choice = match self.inner.engine {
            true => choose_over_mpi(wanted, &facts),
            false => choose(wanted, &facts),
        };
        let choice = choice.map_err(|what| match (wanted, Api::get()) {
            (DeviceEngine::Nccl, Err(missing)) => self.misuse(format!("{what}: {missing}")),
            _ => self.misuse(what),
        })?;
        let choice = if register { choice.with_registration(&facts) } else { choice };
        let mps = || choice::mps_warning(&facts, lockstep_cuda::mps_runs());
        let choice = EngineChoice { warning: choice.warning.or_else(mps), ..choice };
        let engine = match (choice.engine, gpu) {
            (DeviceEngine::Shared, Some(gpu)) => {
                Engine::Shared(shared::Shared::open(self, gpu, &facts)?)
            }
            (DeviceEngine::Nccl, Some(gpu)) => {
                let sharing = choice::most_sharing(&facts);
                Engine::Nccl(Nccl::open(self, gpu, sharing, choice.registers)?)
            }
            #[cfg(feature = "mpi")]
            (DeviceEngine::Mpi, Some(gpu)) => Engine::Mpi(gpu.clone()),
            _ => Engine::Host,
        };
        let state = Arc::new(State {
            choice: choice.clone(),
            engine,
            sends: LazyStream::of_each(self.size()),
            receives: LazyStream::of_each(self.size()),
        });
        // Another thread of this rank cannot have opened the group: calls of a group are made in order.
        let _ = self.inner.device.set(state);
        Ok(choice)
    }

    /// This group on device memory. None if it was not opened, or its engine is that of host memory.
    pub fn device(&self) -> Option<DeviceGroup> {
        let state = self.inner.device.get()?;
        let opened = !matches!(state.engine, Engine::Host);
        opened.then(|| DeviceGroup { group: self.clone(), state: state.clone() })
    }

    /// The communicator of a new group of some members, if this group has one. All members call it.
    pub(crate) fn split_device(&self, members: &[usize]) -> Result<Option<Communicator>> {
        match self.inner.device.get().map(|state| &state.engine) {
            Some(Engine::Nccl(nccl)) => nccl.split(self, members),
            _ => Ok(None),
        }
    }

    fn exchange_facts(&self, gpu: Option<&Gpu>) -> Result<Vec<MemberFacts>> {
        let uuid = |gpu: &Gpu| {
            let uuid = u128::from_le_bytes(gpu.context.uuid());
            [uuid as u64, (uuid >> 64) as u64]
        };
        let own = MemberFacts {
            rank: self.inner.context.rank,
            host: self.hosts()[self.rank()],
            pid: u64::from(std::process::id()),
            gpu: gpu.map(uuid),
            nccl: gpu.and_then(|_| Api::get().ok()).map_or(0, |api| api.version),
            #[cfg(feature = "mpi")]
            cuda_aware_mpi: crate::mpi::is_cuda_aware(),
            #[cfg(not(feature = "mpi"))]
            cuda_aware_mpi: None,
        };
        let mut all = vec![0i64; MemberFacts::WORDS * self.size()];
        self.all_gather(&own.words(), &mut all)?;
        let fact = |(m, words)| MemberFacts::from_words(self.members()[m], self.hosts()[m], words);
        Ok(all.chunks(MemberFacts::WORDS).enumerate().map(fact).collect())
    }
}

impl DeviceGroup {
    pub fn group(&self) -> &Group {
        &self.group
    }

    pub fn engine(&self) -> DeviceEngine {
        self.state.choice.engine
    }

    /// Whether the buffers of collectives are registered with NCCL.
    pub fn registers(&self) -> bool {
        self.state.choice.registers
    }

    /// [`Group::all_reduce`] of `input` into `output`, which may be the same memory.
    pub fn all_reduce(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
        op: Op,
    ) -> Result<()> {
        self.run(
            stream,
            input.dtype(),
            Some(input),
            CollectiveArgs::AllReduce { bytes: output, op },
        )
    }

    /// [`Group::reduce`] of `input` into the root's `output`, which may be the same memory.
    pub fn reduce(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
        op: Op,
        root: usize,
    ) -> Result<()> {
        let args = CollectiveArgs::Reduce { bytes: output, op, root };
        self.run(stream, input.dtype(), Some(input), args)
    }

    /// [`Group::reduce_scatter`]. The output may be this member's shard of the input.
    pub fn reduce_scatter(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
        op: Op,
    ) -> Result<()> {
        let args = CollectiveArgs::ReduceScatter { input, output, op };
        self.run(stream, input.dtype(), None, args)
    }

    /// [`Group::all_gather`]. The input may be this member's shard of the output.
    pub fn all_gather(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
    ) -> Result<()> {
        self.run(stream, input.dtype(), None, CollectiveArgs::AllGather { input, output })
    }

    /// [`Group::broadcast`].
    pub fn broadcast(&self, stream: &Stream, buffer: DeviceSlice, root: usize) -> Result<()> {
        let args = CollectiveArgs::Broadcast { bytes: buffer, root };
        self.run(stream, buffer.dtype(), Some(buffer), args)
    }

    /// [`Group::gather`].
    pub fn gather(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
        root: usize,
    ) -> Result<()> {
        let output =
            if self.group.rank() == root { output } else { DeviceSlice::empty(input.dtype()) };
        self.run(stream, input.dtype(), None, CollectiveArgs::Gather { input, output, root })
    }

    /// [`Group::scatter`].
    pub fn scatter(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
        root: usize,
    ) -> Result<()> {
        let input =
            if self.group.rank() == root { input } else { DeviceSlice::empty(output.dtype()) };
        self.run(stream, output.dtype(), None, CollectiveArgs::Scatter { input, output, root })
    }

    /// [`Group::all_to_all`].
    pub fn all_to_all(
        &self,
        stream: &Stream,
        input: DeviceSlice,
        output: DeviceSlice,
    ) -> Result<()> {
        self.run(stream, input.dtype(), None, CollectiveArgs::AllToAll { input, output })
    }

    /// [`Group::all_to_all_v`].
    pub fn all_to_all_v(
        &self,
        stream: &Stream,
        (input, sent): (DeviceSlice, &[usize]),
        (output, received): (DeviceSlice, &[usize]),
    ) -> Result<()> {
        let (sent, received) = (sent.into(), received.into());
        let args = CollectiveArgs::AllToAllV { input, sent, output, received };
        self.run(stream, input.dtype(), None, args)
    }

    /// Validates and performs a collective. `source` is the input of a collective that has one buffer on the host.
    fn run(
        &self,
        stream: &Stream,
        dtype: Dtype,
        source: Option<DeviceSlice>,
        args: DeviceArgs<'_>,
    ) -> Result<()> {
        self.check(dtype, source, &args)?;
        let (inner, track) = (&self.group.inner, &self.group.inner.track);
        let algo = match &self.state.engine {
            Engine::Shared(_) => Algo::Shared,
            Engine::Nccl(_) => Algo::Nccl,
            #[cfg(feature = "mpi")]
            Engine::Mpi(_) => Algo::Engine,
            Engine::Host => unreachable!("not a device group"),
        };
        let spin = inner.spin_policy(track.in_background());
        track.run(|number, backend| {
            let call = inner.collective_call(&args, (algo, dtype), number);
            let _span = inner.span(&call, call.kind.name(), None);
            inner.recorded(call, spin, |watch| match &self.state.engine {
                Engine::Shared(shared) => {
                    let lane = backend.lane();
                    lane.begin(watch);
                    let result = shared.perform(lane, stream, dtype, source, &args);
                    lane.end();
                    result
                }
                Engine::Nccl(nccl) => {
                    let watch = nccl.compare(backend.lane(), watch)?;
                    nccl.perform(watch, stream, dtype, source, &args)
                }
                #[cfg(feature = "mpi")]
                Engine::Mpi(gpu) => {
                    let place = crate::mpi::Place { gpu, stream };
                    backend.mpi().perform_on_device(&watch, place, (dtype, source), &args)
                }
                Engine::Host => unreachable!("not a device group"),
            })
        })
    }

    fn check(
        &self,
        dtype: Dtype,
        source: Option<DeviceSlice>,
        args: &DeviceArgs<'_>,
    ) -> Result<()> {
        self.group.check_args(args, dtype)?;
        let buffers = args.buffers();
        if let Some(other) =
            buffers.iter().chain(&source).find(|b| !b.is_empty() && b.dtype() != dtype)
        {
            let kind = args.kind().name();
            return Err(self.group.misuse(format!(
                "{kind} in group {}: the buffers are {} and {}; use one type",
                self.group.name(),
                dtype.name(),
                other.dtype().name()
            )));
        }
        if let Some(source) = source
            && source.bytes() != args.bytes()
        {
            let (kind, width) = (args.kind().name(), dtype.bytes());
            return Err(self.group.misuse(format!(
                "{kind} in group {}: the output has {} elements, expected {}",
                self.group.name(),
                args.bytes() / width,
                source.len()
            )));
        }
        Ok(())
    }
}

impl DeviceArgs<'_> {
    /// Input and output; the same for collectives with one buffer.
    pub(crate) fn buffers(&self) -> [DeviceSlice; 2] {
        match self {
            CollectiveArgs::AllReduce { bytes, .. }
            | CollectiveArgs::Reduce { bytes, .. }
            | CollectiveArgs::Broadcast { bytes, .. } => [*bytes; 2],
            CollectiveArgs::ReduceScatter { input, output, .. }
            | CollectiveArgs::AllGather { input, output }
            | CollectiveArgs::Gather { input, output, .. }
            | CollectiveArgs::Scatter { input, output, .. }
            | CollectiveArgs::AllToAll { input, output }
            | CollectiveArgs::AllToAllV { input, output, .. } => [*input, *output],
            CollectiveArgs::Barrier => [DeviceSlice::empty(Dtype::U8); 2],
        }
    }
}
