//! Gradients of a block's weights: computed into its flat buffer immediately, or deferred.

use std::ops::Range;

use lockstep_kernels::{
    Device, Dtype, Fp8Tensor, GroupedMatmul, Matmul, RowGroups, Stack, Tag, Tensor, ViewMut,
};

/// Receives the weight gradients of one block's backward pass.
pub struct WeightGrads<'a> {
    device: &'a Device,
    /// The block's flat gradient.
    grads: ViewMut<'a>,
    /// Whether it holds the gradient of an earlier micro-batch, to be added to.
    accumulate: bool,
    /// The gradient of the shared parameter, and whether to add to it.
    shared: Option<(ViewMut<'a>, bool)>,
    /// The range that a block sharing it has already written in this pass.
    written: Option<Range<usize>>,
    deferred: Option<&'a mut Vec<Deferred>>,
}

/// A deferred weight gradient, into a part of the block's gradient.
pub struct Deferred {
    dy: Tensor,
    kind: DeferredKind,
    /// Whether to add to the gradient.
    accumulate: bool,
}

enum DeferredKind {
    /// `dyᵀ · x`.
    Weight { range: Range<usize>, x: Tensor },
    /// The sum of the rows of `dy`.
    Bias { range: Range<usize> },
    /// `dyᵀ · x` of each group of rows.
    Stack { stack: Stack, groups: RowGroups, x: Tensor },
}

impl<'a> WeightGrads<'a> {
    /// Computes weight gradients immediately.
    pub fn new(device: &'a Device, grads: ViewMut<'a>, accumulate: bool) -> WeightGrads<'a> {
        WeightGrads { device, grads, accumulate, shared: None, written: None, deferred: None }
    }

    /// Defers weight gradients: a zero-bubble schedule runs them in its gaps.
    pub fn deferring(self, deferred: &'a mut Vec<Deferred>) -> WeightGrads<'a> {
        WeightGrads { deferred: Some(deferred), ..self }
    }

    pub(crate) fn with_shared(self, grads: ViewMut<'a>, accumulate: bool) -> WeightGrads<'a> {
        WeightGrads { shared: Some((grads, accumulate)), ..self }
    }

    pub(crate) fn with_written(self, range: Range<usize>) -> WeightGrads<'a> {
        WeightGrads { written: Some(range), ..self }
    }

    /// The gradient of a parameter, and whether to add to it; for gradients that are never deferred.
    pub fn place(&mut self, range: Range<usize>) -> (ViewMut<'_>, bool) {
        let accumulate = self.accumulate || self.written.as_ref() == Some(&range);
        (self.grads.reborrow().part(range), accumulate)
    }

    /// The gradient of the shared matrix (rows, cols), and whether to add to it.
    ///
    /// # Panics
    /// If the block shares no parameter.
    pub fn shared_place(&mut self) -> (ViewMut<'_>, bool) {
        let (grads, accumulate) = self.shared.as_mut().expect("the block shares a parameter");
        (grads.reborrow(), *accumulate)
    }

    /// Computes a gradient in f32, whatever the type of the buffer. `compute` gets the place, and whether to add to it.
    pub fn in_f32(&mut self, range: Range<usize>, compute: impl FnOnce(ViewMut<'_>, bool)) {
        let device = self.device;
        let (place, accumulate) = self.place(range);
        in_f32(device, place, accumulate, compute);
    }

    /// The gradient of a weight (out, in): `dyᵀ · x`.
    pub fn weight(&mut self, range: Range<usize>, dy: &Tensor, x: &Tensor) {
        let accumulate = self.place(range.clone()).1;
        self.run_or_defer(dy, DeferredKind::Weight { range, x: x.clone() }, accumulate);
    }

    /// The gradients of several weights, each from its group of rows.
    pub fn weight_stack(&mut self, groups: &RowGroups, stack: Stack, dy: &Tensor, x: &Tensor) {
        let kind = DeferredKind::Stack { stack, groups: groups.clone(), x: x.clone() };
        self.run_or_defer(dy, kind, self.accumulate);
    }

    /// The gradient of a bias (out): the sum of the rows of `dy`.
    pub fn bias(&mut self, range: Range<usize>, dy: &Tensor) {
        let accumulate = self.place(range.clone()).1;
        self.run_or_defer(dy, DeferredKind::Bias { range }, accumulate);
    }

    /// The gradient of a weight (out, in) from fp8 matrices: `dyᵀ · x`. Never deferred.
    pub(crate) fn fp8_weight(&mut self, range: Range<usize>, dy: &Fp8Tensor, x: &Fp8Tensor) {
        let device = self.device;
        let (place, accumulate) = self.place(range);
        let (rows, cols) = (dy.transposed().rows(), x.transposed().rows());
        let product = Matmul::fp8_linear_dw(dy, x, place.shaped(rows, cols));
        device.matmul(Matmul { accumulate, ..product });
    }

    fn run_or_defer(&mut self, dy: &Tensor, kind: DeferredKind, accumulate: bool) {
        let work = Deferred { dy: dy.clone(), kind, accumulate };
        match &mut self.deferred {
            Some(deferred) => {
                // Temporary tensors now live as long as activations.
                work.tensors().for_each(|tensor| tensor.retag(Tag::Activations));
                deferred.push(work);
            }
            None => work.run(self.device, self.grads.reborrow()),
        }
    }
}

impl Deferred {
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let x = match &self.kind {
            DeferredKind::Weight { x, .. } | DeferredKind::Stack { x, .. } => Some(x),
            DeferredKind::Bias { .. } => None,
        };
        std::iter::once(&self.dy).chain(x)
    }

    /// Computes the gradient into the block's flat buffer.
    pub fn run(&self, device: &Device, grads: ViewMut<'_>) {
        let (dy, accumulate) = (self.dy.view(), self.accumulate);
        match &self.kind {
            DeferredKind::Weight { range, x } => {
                let dw = grads.part(range.clone()).shaped(dy.cols(), x.cols());
                device.matmul(Matmul { accumulate, ..Matmul::linear_dw(dy, x.view(), dw) });
            }
            DeferredKind::Bias { range } => {
                let place = grads.part(range.clone());
                in_f32(device, place, accumulate, |sums, add| device.column_sums(dy, sums, add))
            }
            DeferredKind::Stack { stack, groups, x } => {
                let mut product = GroupedMatmul::linear_dw(groups, (grads, *stack), dy, x.view());
                product.accumulate = accumulate;
                device.grouped_matmul(product);
            }
        }
    }
}

/// Computes a gradient in f32, into its place or through a temporary: only matrix multiplies write other types.
fn in_f32(
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
