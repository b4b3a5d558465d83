//! Collectives and messages on the memory of GPUs, over a library that reads and writes it (CUDA-aware MPI). The library
//! moves bytes; sums are computed by our kernel, in member order, because a library cannot run our operators for half
//! precision and for NaNs on a GPU. An all-reduce is an all-to-all, the kernel, and an all-gather.
//!
//! MPI knows no streams: the host waits for the GPU before a transfer and for the transfer before it enqueues what
//! follows.

use super::collectives::{Engine, check_counts, packed, shard_counts};
use super::numbers::datatype;
use super::request::Request;
use super::staging::Addresses;
use super::supervision::Supervision;
use crate::call::error::Result;
use crate::call::fold::Op;
use crate::device::shared::launch::launch;
use crate::device::shared::work::{Copy, Reduction, Work};
use crate::device::{DeviceArgs, DeviceSlice};
use crate::group::args::CollectiveArgs;
use crate::health::watch::Watch;
use lockstep_cuda::{Address, CudaError, DeviceBuffer, Gpu, Stream, StreamEvent};
use lockstep_types::Dtype;
use mpi::ffi;
use std::ffi::{c_int, c_void};

/// Whether the library says that it reads and writes the memory of GPUs. None if it does not say.
pub(crate) fn is_cuda_aware() -> Option<bool> {
    // SAFETY: a name that ends with a zero. The function is an extension of Open MPI, which MPICH has too.
    let query = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"MPIX_Query_cuda_support".as_ptr()) };
    if query.is_null() {
        return None;
    }
    // SAFETY: the type of the function in every library that has it.
    let query: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(query) };
    // SAFETY: may be called at any time.
    Some(unsafe { query() } == 1)
}

/// Staging buffers in device memory, for the same reasons as those in host memory (`staging`).
#[derive(Default)]
pub(super) struct DeviceStaging {
    buffers: Buffers,
    /// Whether an operation of the library may be using the buffers.
    busy: bool,
    /// The end of the last call that used them, on whatever stream.
    last: Option<StreamEvent>,
}

#[derive(Default)]
struct Buffers {
    out: Option<DeviceBuffer>,
    inc: Option<DeviceBuffer>,
    counts: [Vec<c_int>; 4],
}

impl DeviceStaging {
    /// At least this many bytes to send and to receive, which operations of the stream may use. Returns their addresses.
    pub(super) fn reserve(
        &mut self,
        place: Place<'_>,
        supervision: &Supervision,
        bytes: [usize; 2],
    ) -> Result<[Address; 2]> {
        if let Some(last) = &self.last {
            place.stream.wait_for(last);
        }
        self.grow(place.gpu, bytes).map_err(|error| supervision.failed(error.to_string()))
    }

    fn grow(
        &mut self,
        gpu: &Gpu,
        [out, inc]: [usize; 2],
    ) -> std::result::Result<[Address; 2], CudaError> {
        self.abandon_if_busy();
        let grown = |buffer: &mut Option<DeviceBuffer>, bytes: usize| {
            if buffer.as_ref().is_none_or(|buffer| buffer.bytes < bytes) {
                // Freeing waits for the GPU.
                *buffer = None;
                let size = bytes.max(1).next_power_of_two();
                *buffer = Some(gpu.context.allocate(size, "a buffer for MPI")?);
            }
            Ok(buffer.as_ref().expect("just allocated").address)
        };
        Ok([grown(&mut self.buffers.out, out)?, grown(&mut self.buffers.inc, inc)?])
    }

    /// Runs one operation of the library, which `call` starts, on the addresses of `reserve`, after everything that was
    /// enqueued on `stream`.
    pub(super) fn run(
        &mut self,
        supervision: &Supervision,
        stream: &Stream,
        [out, inc]: [Address; 2],
        counts: [Vec<c_int>; 4],
        call: impl FnOnce(&Addresses, *mut ffi::MPI_Request) -> c_int,
    ) -> Result<()> {
        stream.synchronize();
        self.buffers.counts = counts;
        let addresses = Addresses {
            out: out as *const c_void,
            inc: inc as *mut c_void,
            counts: self.buffers.counts.each_ref().map(|counts| counts.as_ptr()),
        };
        self.busy = true;
        let request =
            Request::start(|r| call(&addresses, r)).map_err(|what| supervision.failed(what))?;
        request.wait(supervision)?;
        self.busy = false;
        Ok(())
    }

    /// Marks the end of a call.
    pub(super) fn used(&mut self, stream: &Stream) {
        self.last = Some(stream.record());
    }

    fn abandon_if_busy(&mut self) {
        if self.busy {
            std::mem::forget(std::mem::take(&mut self.buffers));
            self.busy = false;
        }
    }
}

impl Drop for DeviceStaging {
    fn drop(&mut self) {
        self.abandon_if_busy();
    }
}

/// Where a call on device memory runs.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub gpu: &'a Gpu,
    pub stream: &'a Stream,
}

impl Place<'_> {
    pub(super) fn copy(&self, source: Address, target: Address, bytes: usize) {
        if bytes > 0 {
            let copies = vec![Copy { source, bytes, targets: vec![target] }];
            launch(self.gpu, self.stream, Dtype::U8, &Work::Copy(copies));
        }
    }

    /// Combines `members` consecutive shards of `count` elements at `shards` into `target`.
    fn combine(
        &self,
        dtype: Dtype,
        op: Op,
        shards: Address,
        (members, count): (usize, usize),
        target: Address,
    ) {
        if count > 0 {
            let each = (count * dtype.bytes()) as u64;
            let inputs = (0..members as u64).map(|m| shards + m * each).collect();
            let jobs = vec![Reduction { start: 0, count, outputs: vec![target] }];
            launch(self.gpu, self.stream, dtype, &Work::Reduce { inputs, op, jobs });
        }
    }
}

impl Engine {
    /// Performs a collective on device memory. `source` is the input of a collective that has one buffer on the host.
    pub(crate) fn perform_on_device(
        &mut self,
        watch: &Watch,
        place: Place<'_>,
        (dtype, source): (Dtype, Option<DeviceSlice>),
        args: &DeviceArgs<'_>,
    ) -> Result<()> {
        let members = self.members.clone();
        let supervision = Supervision::call(watch, &members);
        check_counts(args, dtype, watch)?;
        self.compare_calls(watch, &supervision)?;
        if let CollectiveArgs::AllToAllV { sent, received, .. } = args {
            self.compare_counts(sent, received, watch, &supervision)?;
        }
        self.execute_on_device(&supervision, place, (dtype, source), args)
    }

    #[expect(
        clippy::undocumented_unsafe_blocks,
        reason = "one safety comment for all, at the top of the match"
    )]
    fn execute_on_device(
        &mut self,
        supervision: &Supervision,
        place: Place<'_>,
        (dtype, source): (Dtype, Option<DeviceSlice>),
        args: &DeviceArgs<'_>,
    ) -> Result<()> {
        let (me, members, width) = (self.me, self.members.len(), dtype.bytes());
        let (comm, kind, stream) = (self.comm.raw.0, datatype(dtype), place.stream);
        let [input, output] = args.buffers();
        let input = source.unwrap_or(input);
        let count = |bytes: usize| (bytes / width) as c_int;
        // The shards of a reduction: our shard of every member arrives, one after the other.
        let (counts, starts) = shard_counts(args.bytes(), members, width);
        let own = counts[me] as usize;
        let own_start = starts[me] as u64 * width as u64;
        let arriving = match args.op() {
            Some(_) => members * own * width,
            None => 0,
        };
        let staging = &mut self.device;
        let at =
            staging.reserve(place, supervision, [input.bytes(), output.bytes().max(arriving)])?;
        let [out, inc] = at;
        let root = args.root().unwrap_or(me);
        let sends = me == root
            || !matches!(args, CollectiveArgs::Broadcast { .. } | CollectiveArgs::Scatter { .. });
        if sends {
            place.copy(input.address(), out, input.bytes());
        }
        // SAFETY, for every call below: the buffers have the reserved sizes, which the counts match, and nothing else uses
        // them until the operation has ended.
        let mut scatter_sum = |op: Op, target: Address| {
            let each: Vec<c_int> = vec![own as c_int; members];
            let places = (0..members).map(|m| (m * own) as c_int).collect();
            let counts = [counts.clone(), starts.clone(), each, places];
            staging.run(supervision, stream, at, counts, |b, r| unsafe {
                let [sent, from, received, to] = b.counts;
                ffi::MPI_Ialltoallv(b.out, sent, from, kind, b.inc, received, to, kind, comm, r)
            })?;
            place.combine(dtype, op, inc, (members, own), target);
            Ok(())
        };
        // The summed shard replaces the one that was sent.
        let summed = out + own_start;
        let shard = [summed, inc];
        match args {
            CollectiveArgs::Barrier => {}
            CollectiveArgs::AllReduce { op, .. } => {
                scatter_sum(*op, summed)?;
                let counts = [counts, starts, vec![], vec![]];
                staging.run(supervision, stream, shard, counts, |b, r| unsafe {
                    let [counts, starts, ..] = b.counts;
                    let n = own as c_int;
                    ffi::MPI_Iallgatherv(b.out, n, kind, b.inc, counts, starts, kind, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
            CollectiveArgs::Reduce { op, root, .. } => {
                scatter_sum(*op, summed)?;
                let counts = [counts, starts, vec![], vec![]];
                staging.run(supervision, stream, shard, counts, |b, r| unsafe {
                    let ([counts, starts, ..], n) = (b.counts, own as c_int);
                    let to = *root as c_int;
                    ffi::MPI_Igatherv(b.out, n, kind, b.inc, counts, starts, kind, to, comm, r)
                })?;
                if me == *root {
                    place.copy(inc, output.address(), output.bytes());
                }
            }
            CollectiveArgs::ReduceScatter { op, .. } => scatter_sum(*op, output.address())?,
            CollectiveArgs::AllGather { .. } => {
                let counts = [counts, starts, vec![], vec![]];
                let n = count(input.bytes());
                staging.run(supervision, stream, at, counts, |b, r| unsafe {
                    let [counts, starts, ..] = b.counts;
                    ffi::MPI_Iallgatherv(b.out, n, kind, b.inc, counts, starts, kind, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
            CollectiveArgs::Broadcast { root, .. } => {
                let (n, from) = (count(output.bytes()), *root as c_int);
                staging.run(supervision, stream, at, Default::default(), |b, r| unsafe {
                    let buffer = if me == *root { b.out.cast_mut() } else { b.inc };
                    ffi::MPI_Ibcast(buffer, n, kind, from, comm, r)
                })?;
                if me != *root {
                    place.copy(inc, output.address(), output.bytes());
                }
            }
            CollectiveArgs::Gather { root, .. } => {
                let (n, to) = (count(input.bytes()), *root as c_int);
                staging.run(supervision, stream, at, Default::default(), |b, r| unsafe {
                    ffi::MPI_Igather(b.out, n, kind, b.inc, n, kind, to, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
            CollectiveArgs::Scatter { root, .. } => {
                let (n, from) = (count(output.bytes()), *root as c_int);
                staging.run(supervision, stream, at, Default::default(), |b, r| unsafe {
                    ffi::MPI_Iscatter(b.out, n, kind, b.inc, n, kind, from, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
            CollectiveArgs::AllToAll { .. } => {
                let n = count(input.bytes() / members);
                staging.run(supervision, stream, at, Default::default(), |b, r| unsafe {
                    ffi::MPI_Ialltoall(b.out, n, kind, b.inc, n, kind, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
            CollectiveArgs::AllToAllV { sent, received, .. } => {
                let ((sent, from), (received, to)) = (packed(sent), packed(received));
                let counts = [sent, from, received, to];
                staging.run(supervision, stream, at, counts, |b, r| unsafe {
                    let [sent, from, received, to] = b.counts;
                    ffi::MPI_Ialltoallv(b.out, sent, from, kind, b.inc, received, to, kind, comm, r)
                })?;
                place.copy(inc, output.address(), output.bytes());
            }
        }
        staging.used(stream);
        Ok(())
    }
}
