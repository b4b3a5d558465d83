//! Collectives and messages on tensors, blocking and started. The only file of `parallel`, `model` and `trainer`
//! that turns a tensor into a host slice: a backend with device memory is added here.
//!
//! All functions take views, and every element type travels as it is stored.

use half::bf16;
use lockstep_comm::{Group, Op, Pending, Result};
use lockstep_kernels::{Dtype, Tensor, View, ViewMut};

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
pub(crate) fn all_reduce(group: &Group, x: ViewMut<'_>, op: Op) -> Result<()> {
    with_element!(x.dtype(), E => group.all_reduce(x.host::<E>(), op))
}

/// Sums `input` over the group; each rank gets its shard of the sum.
pub(crate) fn reduce_scatter(group: &Group, input: View<'_>, shard: ViewMut<'_>) -> Result<()> {
    with_element!(input.dtype(), E => {
        group.reduce_scatter(input.host::<E>(), shard.host::<E>(), Op::Sum)
    })
}

/// Concatenates the shards of all ranks.
pub(crate) fn all_gather(group: &Group, shard: View<'_>, output: ViewMut<'_>) -> Result<()> {
    with_element!(shard.dtype(), E => group.all_gather(shard.host::<E>(), output.host::<E>()))
}

/// Sends piece q of `input` to rank q; piece p of `output` comes from rank p. All pieces have the same size.
pub(crate) fn all_to_all(group: &Group, input: View<'_>, output: ViewMut<'_>) -> Result<()> {
    with_element!(input.dtype(), E => group.all_to_all(input.host::<E>(), output.host::<E>()))
}

/// Sends `sent[q]` rows of `input` to rank q and receives `received[p]` rows of `output` from rank p.
pub(crate) fn all_to_all_v(
    group: &Group,
    input: View<'_>,
    sent: &[usize],
    output: ViewMut<'_>,
    received: &[usize],
) -> Result<()> {
    let cols = input.cols();
    let elements = |rows: &[usize]| rows.iter().map(|rows| rows * cols).collect::<Vec<_>>();
    let (sent, received) = (elements(sent), elements(received));
    with_element!(input.dtype(), E => {
        group.all_to_all_v(input.host::<E>(), &sent, output.host::<E>(), &received)
    })
}

/// Receives a message from rank `from`.
pub(crate) fn receive(group: &Group, x: ViewMut<'_>, from: usize) -> Result<()> {
    with_element!(x.dtype(), E => group.receive(x.host::<E>(), from))
}

/// Starts sending a tensor to rank `to`. Other handles of the tensor may be read in the meantime.
pub(crate) fn start_send(group: &Group, x: Tensor, to: usize) -> Transfer {
    Transfer(with_element!(x.dtype(), E => group.start_send::<E, _>(Message(x), to)))
}

/// Starts receiving a tensor from rank `from`. It must be the only handle of its memory.
pub(crate) fn start_receive(group: &Group, x: Tensor, from: usize) -> Transfer {
    Transfer(with_element!(x.dtype(), E => group.start_receive::<E, _>(Message(x), from)))
}

/// A message in flight.
#[must_use = "wait for a transfer: `wait` returns its tensor and errors"]
pub(crate) struct Transfer(Pending<Result<Message>>);

impl Transfer {
    /// Waits for the end of the transfer and returns the tensor.
    pub fn wait(self) -> Result<Tensor> {
        self.0.wait().map(|message| message.0)
    }

    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// A tensor in the form that started calls take.
struct Message(Tensor);

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
