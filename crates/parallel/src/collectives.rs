//! Collectives and messages on tensors, blocking and started. The only file of `parallel`, `model` and `trainer`
//! that turns a tensor into a host slice.
//!
//! All functions take views, and every element type travels as it is stored. For tensors in the memory of a GPU, calls are
//! enqueued on the stream of the device if the group has an engine for device memory ([`Group::device`]). Otherwise they
//! travel through page-locked host memory: a copy waits for the operations that were issued before it.

use half::bf16;
use lockstep_comm::{DeviceGroup, DeviceSlice, Group, Op, Pending, Result};
use lockstep_cuda::{Stream, StreamEvent};
use lockstep_kernels::{Device, Dtype, Location, Tag, Tensor, View, ViewMut};

/// Evaluates an expression with `$E` as the element type of a view.
macro_rules! with_element {
    ($dtype:expr, $E:ident => $call:expr) => {
        match $dtype {
            Dtype::F32 => {
                type $E = f32;
                $call
            }
            Dtype::Bf16 => {
                type $E = bf16;
                $call
            }
            Dtype::U8 => {
                type $E = u8;
                $call
            }
            dtype => panic!("{dtype} tensors are not sent to other ranks"),
        }
    };
}

/// Combines `x` over the group, in place.
pub(crate) fn all_reduce(device: &Device, group: &Group, x: ViewMut<'_>, op: Op) -> Result<()> {
    if group.size() == 1 {
        return Ok(());
    }
    if let Some((group, stream)) = on_device(device, group, [x.location()]) {
        let x = slice(x.as_view());
        return group.all_reduce(stream, x, x, op);
    }
    let mut x = Output::holding(device, x);
    with_element!(x.dtype(), E => group.all_reduce(x.host().host::<E>(), op))?;
    x.finish();
    Ok(())
}

/// Sums `input` over the group; each rank gets its shard of the sum.
pub(crate) fn reduce_scatter(
    device: &Device,
    group: &Group,
    input: View<'_>,
    shard: ViewMut<'_>,
) -> Result<()> {
    if group.size() == 1 {
        device.copy(input, shard);
        return Ok(());
    }
    if let Some((group, stream)) = on_device(device, group, [input.location(), shard.location()]) {
        return group.reduce_scatter(stream, slice(input), slice(shard.as_view()), Op::Sum);
    }
    let (input, mut shard) = (Input::new(device, input), Output::new(device, shard));
    with_element!(input.host().dtype(), E => {
        group.reduce_scatter(input.host().host::<E>(), shard.host().host::<E>(), Op::Sum)
    })?;
    shard.finish();
    Ok(())
}

/// Concatenates the shards of all ranks.
pub(crate) fn all_gather(
    device: &Device,
    group: &Group,
    shard: View<'_>,
    output: ViewMut<'_>,
) -> Result<()> {
    if group.size() == 1 {
        device.copy(shard, output);
        return Ok(());
    }
    if let Some((group, stream)) = on_device(device, group, [shard.location(), output.location()]) {
        return group.all_gather(stream, slice(shard), slice(output.as_view()));
    }
    let (shard, mut output) = (Input::new(device, shard), Output::new(device, output));
    with_element!(shard.host().dtype(), E => {
        group.all_gather(shard.host().host::<E>(), output.host().host::<E>())
    })?;
    output.finish();
    Ok(())
}

/// Sends piece q of `input` to rank q; piece p of `output` comes from rank p. All pieces have the same size.
pub(crate) fn all_to_all(
    device: &Device,
    group: &Group,
    input: View<'_>,
    output: ViewMut<'_>,
) -> Result<()> {
    if group.size() == 1 {
        device.copy(input, output);
        return Ok(());
    }
    if let Some((group, stream)) = on_device(device, group, [input.location(), output.location()]) {
        return group.all_to_all(stream, slice(input), slice(output.as_view()));
    }
    let (input, mut output) = (Input::new(device, input), Output::new(device, output));
    with_element!(input.host().dtype(), E => {
        group.all_to_all(input.host().host::<E>(), output.host().host::<E>())
    })?;
    output.finish();
    Ok(())
}

/// Rows that an all-to-all sends to each rank and receives from each.
#[derive(Clone, Copy)]
pub(crate) struct RowCounts<'a> {
    pub sent: &'a [usize],
    pub received: &'a [usize],
}

/// Sends `sent[q]` rows of `input` to rank q and receives `received[p]` rows of `output` from rank p.
pub(crate) fn all_to_all_v(
    device: &Device,
    group: &Group,
    counts: RowCounts<'_>,
    input: View<'_>,
    output: ViewMut<'_>,
) -> Result<()> {
    let cols = input.cols();
    let elements = |rows: &[usize]| rows.iter().map(|rows| rows * cols).collect::<Vec<_>>();
    let (sent, received) = (elements(counts.sent), elements(counts.received));
    if let Some((group, stream)) = on_device(device, group, [input.location(), output.location()]) {
        let (input, output) = (slice(input), slice(output.as_view()));
        return group.all_to_all_v(stream, (input, &sent), (output, &received));
    }
    let (input, mut output) = (Input::new(device, input), Output::new(device, output));
    with_element!(input.host().dtype(), E => {
        let output = output.host().host::<E>();
        group.all_to_all_v(input.host().host::<E>(), &sent, output, &received)
    })?;
    output.finish();
    Ok(())
}

/// Receives a message from rank `from`.
pub(crate) fn receive(device: &Device, group: &Group, x: ViewMut<'_>, from: usize) -> Result<()> {
    if let Some((group, stream)) = on_device(device, group, [x.location()])
        && group.has_messages(from)
    {
        return group.receive(stream, slice(x.as_view()), from);
    }
    let mut x = Output::new(device, x);
    with_element!(x.dtype(), E => group.receive(x.host().host::<E>(), from))?;
    x.finish();
    Ok(())
}

/// Starts sending a tensor to rank `to`. Other handles of the tensor may be read in the meantime.
pub(crate) fn start_send(device: &Device, group: &Group, x: Tensor, to: usize) -> Transfer {
    if let Some((group, stream)) = on_device(device, group, [x.location()])
        && group.has_messages(to)
    {
        let message = slice(x.view());
        let pending = group.start_send(stream.record(), message, x, to);
        return Transfer::OnDevice { pending, device: device.clone() };
    }
    let x = device.to_host(x);
    let pending = with_element!(x.dtype(), E => group.start_send::<E, _>(Message(x), to));
    Transfer::Staged { pending, target: None }
}

/// Starts receiving a tensor from rank `from`. It must be the only handle of its memory.
pub(crate) fn start_receive(device: &Device, group: &Group, x: Tensor, from: usize) -> Transfer {
    if let Some((group, stream)) = on_device(device, group, [x.location()])
        && group.has_messages(from)
    {
        let message = slice(x.view());
        let pending = group.start_receive(stream.record(), message, x, from);
        return Transfer::OnDevice { pending, device: device.clone() };
    }
    let (message, target) = match x.location().is_host_accessible() {
        true => (Message(x), None),
        false => {
            let host = device.empty_host(x.rows(), x.cols(), x.dtype(), Tag::Buffers);
            (Message(host), Some((device.clone(), x)))
        }
    };
    let dtype = message.0.dtype();
    Transfer::Staged {
        pending: with_element!(dtype, E => group.start_receive::<E, _>(message, from)),
        target,
    }
}

/// A message in flight.
#[must_use = "wait for a transfer: `wait` returns its tensor and errors"]
pub(crate) enum Transfer {
    /// In device memory, on a stream of its own.
    OnDevice { pending: Pending<Result<(Tensor, StreamEvent)>>, device: Device },
    /// As above, enqueued: the tensor may not be overwritten before the GPU has reached the event.
    Enqueued { tensor: Tensor, done: StreamEvent, device: Device },
    /// Through host memory; `target` is the tensor in device memory that receives the message.
    Staged { pending: Pending<Result<Message>>, target: Option<(Device, Tensor)> },
}

impl Transfer {
    /// Waits for the end of the transfer and returns the tensor.
    pub fn wait(self) -> Result<Tensor> {
        match self {
            Transfer::OnDevice { pending, device } => {
                let (tensor, done) = pending.wait()?;
                Transfer::Enqueued { tensor, done, device }.wait()
            }
            Transfer::Enqueued { tensor, done, device } => {
                // The device waits for the end of the transfer; the host only for its start.
                device.stream().expect("a device with a stream").wait_for(&done);
                Ok(tensor)
            }
            Transfer::Staged { pending, target: None } => pending.wait().map(|Message(x)| x),
            Transfer::Staged { pending, target: Some((device, mut target)) } => {
                let Message(arrived) = pending.wait()?;
                write(&device, &arrived, target.view_mut());
                Ok(target)
            }
        }
    }
}

/// The group on device memory and the stream to use, if all buffers are there and the group has an engine for it.
fn on_device<'a, const N: usize>(
    device: &'a Device,
    group: &Group,
    buffers: [Location; N],
) -> Option<(DeviceGroup, &'a Stream)> {
    let on_device = buffers.iter().all(|location| !location.is_host_accessible());
    group.device().filter(|_| on_device).zip(device.stream())
}

fn slice(view: View<'_>) -> DeviceSlice {
    // SAFETY: memory of a pool is allocated until the device is dropped, and used again only by later operations of the
    // stream that owns the pool. Callers on another stream keep the tensor until the owner has waited for them.
    unsafe { DeviceSlice::new(view.address(), view.len(), view.dtype()) }
}

/// Input of a collective: a view in host memory, or a copy of it.
enum Input<'a> {
    Host(View<'a>),
    Copied(Tensor),
}

impl<'a> Input<'a> {
    fn new(device: &Device, view: View<'a>) -> Input<'a> {
        match view.location().is_host_accessible() {
            true => Input::Host(view),
            false => Input::Copied(copied(device, view)),
        }
    }

    fn host(&self) -> View<'_> {
        match self {
            Input::Host(view) => *view,
            Input::Copied(copy) => copy.view(),
        }
    }
}

/// Output of a collective: a view in host memory, or host memory that is copied to the view at the end.
enum Output<'a> {
    Host(ViewMut<'a>),
    Copied { copy: Tensor, device: &'a Device, to: ViewMut<'a> },
}

impl<'a> Output<'a> {
    fn new(device: &'a Device, to: ViewMut<'a>) -> Output<'a> {
        match to.location().is_host_accessible() {
            true => Output::Host(to),
            false => {
                let copy = device.empty_host(to.rows(), to.cols(), to.dtype(), Tag::Buffers);
                Output::Copied { copy, device, to }
            }
        }
    }

    /// With the present contents of the view.
    fn holding(device: &'a Device, to: ViewMut<'a>) -> Output<'a> {
        match to.location().is_host_accessible() {
            true => Output::Host(to),
            false => Output::Copied { copy: copied(device, to.as_view()), device, to },
        }
    }

    fn dtype(&self) -> Dtype {
        match self {
            Output::Host(view) => view.dtype(),
            Output::Copied { to, .. } => to.dtype(),
        }
    }

    fn host(&mut self) -> ViewMut<'_> {
        match self {
            Output::Host(view) => view.reborrow(),
            Output::Copied { copy, .. } => copy.view_mut(),
        }
    }

    /// Copies the result to the device.
    fn finish(self) {
        if let Output::Copied { copy, device, to } = self {
            write(device, &copy, to);
        }
    }
}

/// A copy in page-locked host memory.
fn copied(device: &Device, view: View<'_>) -> Tensor {
    let mut copy = device.empty_host(view.rows(), view.cols(), view.dtype(), Tag::Buffers);
    with_element!(view.dtype(), E => device.read(view, copy.view_mut().host::<E>()));
    copy
}

/// Copies a tensor from host memory to the device. The tensor may be dropped afterwards.
fn write(device: &Device, from: &Tensor, to: ViewMut<'_>) {
    with_element!(to.dtype(), E => device.write(to, from.view().host::<E>()));
    // The copy reads page-locked memory behind the host's back.
    device.synchronize();
}

/// A tensor in the form that started calls take.
pub(crate) struct Message(Tensor);

macro_rules! message_of {
    ($($element:ty),*) => {$(
        impl AsRef<[$element]> for Message {
            fn as_ref(&self) -> &[$element] {
                self.0.view().host()
            }
        }

        impl AsMut<[$element]> for Message {
            fn as_mut(&mut self) -> &mut [$element] {
                self.0.view_mut().host()
            }
        }
    )*};
}

message_of!(f32, bf16, u8);
