//! Enqueues collectives on a communicator. Shards of different lengths and all-to-alls are grouped calls.

use super::api::{Functions, SUCCESS};
use crate::call::fold::Op;
use crate::call::partition::{Partition, packed};
use crate::device::{DeviceArgs, DeviceSlice};
use crate::group::args::CollectiveArgs;
use lockstep_cuda::{Address, Handle, Stream};
use lockstep_types::Dtype;
use std::ffi::c_int;
use std::ops::Range;

/// Members of a group and our index among them, with where calls go.
pub(super) struct Target<'a> {
    pub api: &'a Functions,
    pub comm: Handle,
    pub stream: Handle,
    pub dtype: Dtype,
    pub me: usize,
    pub members: usize,
}

impl Target<'_> {
    /// Enqueues a collective and returns NCCL's status.
    pub fn enqueue(&self, source: Option<DeviceSlice>, args: &DeviceArgs<'_>) -> c_int {
        let Target { api, comm, stream, dtype, .. } = *self;
        let (kind, width) = (nccl_dtype(dtype), dtype.bytes());
        let even = |bytes: usize| (bytes / width).is_multiple_of(self.members);
        let from = |buffer: &DeviceSlice| source.unwrap_or(*buffer).address();
        // SAFETY: the caller of `DeviceSlice::new` guarantees the buffers; communicator and stream live.
        unsafe {
            match args {
                CollectiveArgs::AllReduce { bytes, op } => {
                    let (input, output) = (from(bytes), bytes.address());
                    (api.ncclAllReduce)(
                        input,
                        output,
                        bytes.len(),
                        kind,
                        nccl_op(*op),
                        comm,
                        stream,
                    )
                }
                CollectiveArgs::Reduce { bytes, op, root } => (api.ncclReduce)(
                    from(bytes),
                    bytes.address(),
                    bytes.len(),
                    kind,
                    nccl_op(*op),
                    *root as c_int,
                    comm,
                    stream,
                ),
                CollectiveArgs::ReduceScatter { input, output, op } if even(input.bytes()) => {
                    let (from, to) = (input.address(), output.address());
                    (api.ncclReduceScatter)(
                        from,
                        to,
                        output.len(),
                        kind,
                        nccl_op(*op),
                        comm,
                        stream,
                    )
                }
                CollectiveArgs::ReduceScatter { input, output, op } => self.grouped(|| {
                    self.each(|owner| {
                        let range = self.shard(input.len(), owner);
                        let from = input.address() + (range.start * width) as u64;
                        let to = output.address();
                        let (op, owner) = (nccl_op(*op), owner as c_int);
                        (api.ncclReduce)(from, to, range.len(), kind, op, owner, comm, stream)
                    })
                }),
                CollectiveArgs::AllGather { input, output } if even(output.bytes()) => {
                    let (from, to) = (input.address(), output.address());
                    (api.ncclAllGather)(from, to, input.len(), kind, comm, stream)
                }
                CollectiveArgs::AllGather { input, output } => self.grouped(|| {
                    self.each(|owner| {
                        let range = self.shard(output.len(), owner);
                        let to = output.address() + (range.start * width) as u64;
                        let (from, owner) = (input.address(), owner as c_int);
                        (api.ncclBroadcast)(from, to, range.len(), kind, owner, comm, stream)
                    })
                }),
                CollectiveArgs::Broadcast { bytes, root } => {
                    let (at, root) = (bytes.address(), *root as c_int);
                    (api.ncclBroadcast)(at, at, bytes.len(), kind, root, comm, stream)
                }
                CollectiveArgs::Gather { input, output, root } => self.grouped(|| {
                    let sent = self.send(input.address(), input.len(), *root);
                    let each = input.len() * width;
                    let receive = |from: usize| {
                        self.receive(output.address() + (from * each) as u64, input.len(), from)
                    };
                    if self.me == *root { worst(sent, self.each(receive)) } else { sent }
                }),
                CollectiveArgs::Scatter { input, output, root } => self.grouped(|| {
                    let received = self.receive(output.address(), output.len(), *root);
                    let each = output.len() * width;
                    let send = |to: usize| {
                        self.send(input.address() + (to * each) as u64, output.len(), to)
                    };
                    if self.me == *root { worst(self.each(send), received) } else { received }
                }),
                CollectiveArgs::AllToAll { input, output } => {
                    let counts = vec![input.len() / self.members; self.members];
                    self.exchange(input.address(), &counts, output.address(), &counts)
                }
                CollectiveArgs::AllToAllV { input, sent, output, received } => {
                    self.exchange(input.address(), sent, output.address(), received)
                }
                CollectiveArgs::Barrier => SUCCESS,
            }
        }
    }

    /// Sends and receives consecutive pieces.
    fn exchange(&self, from: Address, sent: &[usize], to: Address, received: &[usize]) -> c_int {
        let width = self.dtype.bytes();
        let (outgoing, incoming) = (packed(sent, width), packed(received, width));
        self.grouped(|| {
            self.each(|peer| {
                let send = self.send(from + outgoing[peer].start as u64, sent[peer], peer);
                let at = to + incoming[peer].start as u64;
                worst(send, self.receive(at, received[peer], peer))
            })
        })
    }

    pub fn send(&self, from: Address, count: usize, to: usize) -> c_int {
        let Target { api, comm, stream, dtype, .. } = *self;
        if count == 0 {
            return SUCCESS;
        }
        // SAFETY: as in `enqueue`.
        unsafe { (api.ncclSend)(from, count, nccl_dtype(dtype), to as c_int, comm, stream) }
    }

    pub fn receive(&self, to: Address, count: usize, from: usize) -> c_int {
        let Target { api, comm, stream, dtype, .. } = *self;
        if count == 0 {
            return SUCCESS;
        }
        // SAFETY: as in `enqueue`.
        unsafe { (api.ncclRecv)(to, count, nccl_dtype(dtype), from as c_int, comm, stream) }
    }

    fn shard(&self, count: usize, member: usize) -> Range<usize> {
        Partition { count, parts: self.members, width: 1 }.elements(member)
    }

    /// Calls that are enqueued together.
    fn grouped(&self, calls: impl FnOnce() -> c_int) -> c_int {
        // SAFETY: plain calls; a group that was started is always ended.
        unsafe {
            let started = (self.api.ncclGroupStart)();
            let called = calls();
            let ended = (self.api.ncclGroupEnd)();
            worst(worst(started, called), ended)
        }
    }

    fn each(&self, call: impl Fn(usize) -> c_int) -> c_int {
        (0..self.members).map(call).fold(SUCCESS, worst)
    }
}

/// The first status that is not a success.
fn worst(first: c_int, second: c_int) -> c_int {
    if first == SUCCESS { second } else { first }
}

/// `ncclDataType_t`.
fn nccl_dtype(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::U8 => 1,
        Dtype::I32 => 2,
        Dtype::U32 => 3,
        Dtype::I64 => 4,
        Dtype::F16 => 6,
        Dtype::F32 => 7,
        Dtype::F64 => 8,
        Dtype::Bf16 => 9,
    }
}

/// `ncclRedOp_t`.
fn nccl_op(op: Op) -> c_int {
    match op {
        Op::Sum => 0,
        Op::Product => 1,
        Op::Max => 2,
        Op::Min => 3,
        Op::Mean => 4,
    }
}

/// Enqueues a collective of `members` members.
pub(super) fn target<'a>(
    api: &'a Functions,
    comm: Handle,
    stream: &Stream,
    dtype: Dtype,
    (me, members): (usize, usize),
) -> Target<'a> {
    Target { api, comm, stream: stream.handle(), dtype, me, members }
}
