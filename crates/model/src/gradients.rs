//! Gradients of the parameters: where they are gathered, and when.

use std::ops::Range;

use lockstep_kernels::{Device, Dtype, Matmul, Tag, Tensor, ViewMut};

/// The gradient of each block's flat buffer, in f32. A buffer exists from its block's backward pass until it
/// is cleared, so that in one pass gradients take the place of the activations that made them.
pub struct Gradients {
    blocks: Vec<Option<Tensor>>,
}

impl Gradients {
    pub fn new(blocks: usize) -> Gradients {
        Gradients { blocks: (0..blocks).map(|_| None).collect() }
    }

    /// The gradient of a block of `len` parameters, to be written by `Sink`s, and whether it already holds
    /// something to add to.
    pub(crate) fn block(
        &mut self,
        device: &Device,
        block: usize,
        len: usize,
    ) -> (&mut Tensor, bool) {
        let filled = self.blocks[block].is_some();
        let tensor = self.blocks[block]
            .get_or_insert_with(|| device.empty(1, len, Dtype::F32, Tag::Gradients));
        (tensor, filled)
    }

    /// The gradients of the first and of the last block together.
    pub(crate) fn ends(
        &mut self,
        device: &Device,
        first_len: usize,
        last_len: usize,
    ) -> ((&mut Tensor, bool), (&mut Tensor, bool)) {
        let filled = |tensor: &Option<Tensor>| tensor.is_some();
        let make = |len| move || device.empty(1, len, Dtype::F32, Tag::Gradients);
        let [first, .., last] = &mut self.blocks[..] else {
            panic!("a model has an embedding and a head")
        };
        let (first_filled, last_filled) = (filled(first), filled(last));
        let first = first.get_or_insert_with(make(first_len));
        let last = last.get_or_insert_with(make(last_len));
        ((first, first_filled), (last, last_filled))
    }

    /// The gradient of each block that has one, in the order of the blocks.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.blocks.iter().enumerate().filter_map(|(block, tensor)| Some((block, tensor.as_ref()?)))
    }

    /// The same, to be changed in place: summed over ranks, say.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Tensor)> {
        self.blocks
            .iter_mut()
            .enumerate()
            .filter_map(|(block, tensor)| Some((block, tensor.as_mut()?)))
    }

    /// The gradient of a block, once a backward pass has been there.
    pub fn get(&self, block: usize) -> Option<&Tensor> {
        self.blocks[block].as_ref()
    }

    /// Gives the memory back: the next pass starts anew.
    pub fn clear(&mut self) {
        self.blocks.iter_mut().for_each(|tensor| *tensor = None);
    }
}

/// Where a block's backward pass puts the gradients of its weights.
pub struct Sink<'a> {
    /// Flat, f32.
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

impl<'a> Sink<'a> {
    /// Computes weight gradients as they come.
    pub fn now(grads: ViewMut<'a>, accumulate: bool) -> Sink<'a> {
        Sink { grads, accumulate, later: None }
    }

    /// Keeps what they need, for `Deferred::run`: a zero-bubble schedule fills its gaps with them.
    pub fn later(grads: ViewMut<'a>, accumulate: bool, later: &'a mut Vec<Deferred>) -> Sink<'a> {
        Sink { grads, accumulate, later: Some(later) }
    }

    /// Whether gradients are added to what is there.
    pub fn accumulate(&self) -> bool {
        self.accumulate
    }

    /// The place of a parameter's gradient, for what is computed along with the input's gradient.
    pub fn part(&mut self, range: Range<usize>) -> ViewMut<'_> {
        self.grads.reborrow().part(range)
    }

    /// The places of two parameters that follow each other.
    pub fn pair(
        &mut self,
        first: Range<usize>,
        second: Range<usize>,
    ) -> (ViewMut<'_>, ViewMut<'_>) {
        assert_eq!(first.end, second.start, "the two lie side by side");
        let at = first.len();
        self.grads.reborrow().part(first.start..second.end).split_at(at)
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
            Some(later) => later.push(work),
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
            None => device.column_sums(dy, part, accumulate),
        }
    }
}
