//! Where the gradients of weights go: into their block's flat buffer, at once or later.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Matmul, Tag, Tensor, ViewMut};

/// Where a block's backward pass puts the gradients of its weights.
pub struct WeightGrads<'a> {
    /// Flat.
    grads: ViewMut<'a>,
    accumulate: bool,
    later: Option<&'a mut Vec<Deferred>>,
}

/// A weight gradient that was put off: `dyᵀ · x` into a range of the block's gradient.
pub struct Deferred {
    range: Range<usize>,
    dy: Tensor,
    /// Of `dy` and `x`.
    rows: Range<usize>,
    /// Without it, the sum of the rows of `dy`: a bias.
    x: Option<Tensor>,
}

impl<'a> WeightGrads<'a> {
    /// Computes weight gradients as they come.
    pub fn now(grads: ViewMut<'a>, accumulate: bool) -> WeightGrads<'a> {
        WeightGrads { grads, accumulate, later: None }
    }

    /// Keeps what they need, for `Deferred::run`: a zero-bubble schedule fills its gaps with them.
    pub fn deferred(
        grads: ViewMut<'a>,
        accumulate: bool,
        later: &'a mut Vec<Deferred>,
    ) -> WeightGrads<'a> {
        WeightGrads { grads, accumulate, later: Some(later) }
    }

    /// Lets a gradient be computed in f32 along with the input's, whatever type it is kept in: into the place of its
    /// parameters, to be added to what is there or not.
    pub fn wide(
        &mut self,
        device: &Device,
        range: Range<usize>,
        compute: impl FnOnce(ViewMut<'_>, bool),
    ) {
        wide(device, self.grads.reborrow().part(range), self.accumulate, compute);
    }

    /// A weight (out, in): `dyᵀ · x`.
    pub fn weight(&mut self, device: &Device, range: Range<usize>, dy: &Tensor, x: &Tensor) {
        self.weight_of(device, range, dy, x, 0..dy.rows());
    }

    /// The same from some of the rows.
    pub fn weight_of(
        &mut self,
        device: &Device,
        range: Range<usize>,
        dy: &Tensor,
        x: &Tensor,
        rows: Range<usize>,
    ) {
        self.take(device, Deferred { range, rows, dy: dy.clone(), x: Some(x.clone()) });
    }

    /// A bias (out): the sum of the rows of `dy`.
    pub fn bias(&mut self, device: &Device, range: Range<usize>, dy: &Tensor) {
        self.take(device, Deferred { range, rows: 0..dy.rows(), dy: dy.clone(), x: None });
    }

    fn take(&mut self, device: &Device, work: Deferred) {
        match &mut self.later {
            Some(later) => {
                // What lived for a moment now waits like what a forward pass left.
                work.dy.retag(Tag::Activations);
                work.x.iter().for_each(|x| x.retag(Tag::Activations));
                later.push(work);
            }
            None => work.run(device, self.grads.reborrow(), self.accumulate),
        }
    }
}

impl Deferred {
    /// Computes the gradient into its block's flat buffer.
    pub fn run(&self, device: &Device, grads: ViewMut<'_>, accumulate: bool) {
        let part = grads.part(self.range.clone());
        let dy = self.dy.view().rows_of(self.rows.clone());
        match &self.x {
            Some(x) => {
                let dw = part.shaped(dy.cols(), x.cols());
                let x = x.view().rows_of(self.rows.clone());
                device.matmul(Matmul { accumulate, ..Matmul::linear_dw(dy, x, dw) });
            }
            None => wide(device, part, accumulate, |sums, add| device.column_sums(dy, sums, add)),
        }
    }
}

/// Has a gradient computed in f32, into its place or beside it: only multiplies write other types by themselves.
pub(crate) fn wide(
    device: &Device,
    place: ViewMut<'_>,
    accumulate: bool,
    compute: impl FnOnce(ViewMut<'_>, bool),
) {
    if place.dtype() == Dtype::F32 {
        return compute(place, accumulate);
    }
    let cols = place.cols();
    let mut fresh = device.empty(place.rows(), cols, Dtype::F32, Tag::Buffers);
    compute(fresh.view_mut(), false);
    match accumulate {
        true => device.add_columns(fresh.view(), 0..cols, place, 0),
        false => device.cast(fresh.view(), place),
    }
}
