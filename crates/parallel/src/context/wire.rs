//! Tensors on their way between ranks.

use std::marker::PhantomData;

use half::bf16;
use lockstep_comm::{Group, Result};
use lockstep_kernels::{Dtype, Element, Tensor};

/// A number that tensors hold and groups send.
pub(super) trait Number: Element + lockstep_comm::Element {}

impl<T: Element + lockstep_comm::Element> Number for T {}

/// A tensor that a started call may take and give back. What is sent may have other handles, to read it in the
/// meantime; what is received must not.
pub(super) struct Carried<T> {
    pub tensor: Tensor,
    holds: PhantomData<T>,
}

impl<T> From<Tensor> for Carried<T> {
    fn from(tensor: Tensor) -> Carried<T> {
        Carried { tensor, holds: PhantomData }
    }
}

impl<T: Number> AsRef<[T]> for Carried<T> {
    fn as_ref(&self) -> &[T] {
        self.tensor.view().host()
    }
}

impl<T: Number> AsMut<[T]> for Carried<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self.tensor.view_mut().host()
    }
}

/// The q-th part of `input` goes to member q.
pub(super) fn all_to_all(group: &Group, input: &Tensor, output: &mut Tensor) -> Result<()> {
    let (input, output) = (input.view(), output.view_mut());
    match input.dtype() {
        Dtype::Bf16 => group.all_to_all::<bf16>(input.host(), output.host()),
        _ => group.all_to_all::<f32>(input.host(), output.host()),
    }
}
