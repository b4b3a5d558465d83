//! Products of groups of rows, each group with a matrix of its own: the experts of a mixture.

use std::ops::Range;
use std::sync::OnceLock;

use super::{Backend, Device, OpClass};
use crate::{Matmul, Tag, Tensor, View, ViewMut, cuda};

/// Groups of consecutive rows, of which some may be empty.
#[derive(Clone)]
pub struct RowGroups {
    starts: Tensor, // (1, groups + 1), u32
    on_host: OnceLock<Tensor>,
}

impl RowGroups {
    /// `starts` (1, groups + 1), u32, on the device: the first row of each group, and the end of the last.
    pub fn new(starts: Tensor) -> RowGroups {
        RowGroups { starts, on_host: OnceLock::new() }
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.starts.len() - 1
    }

    /// The starts on the device.
    pub fn starts(&self) -> View<'_> {
        self.starts.view()
    }

    /// The starts on the host. The first call waits for the device.
    pub fn on_host(&self, device: &Device) -> &[u32] {
        let copy = || {
            if self.starts.location().is_host_accessible() {
                return self.starts.clone();
            }
            let (len, dtype) = (self.starts.len(), self.starts.dtype());
            let mut host = device.empty_host(1, len, dtype, Tag::Buffers);
            device.read(self.starts.view(), host.view_mut().host::<u32>());
            host
        };
        self.on_host.get_or_init(copy).view().host()
    }
}

/// Matrices of one shape at equal distances in a buffer: a weight of all experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stack {
    /// First element of the first matrix.
    pub first: usize,
    /// Elements from the start of a matrix to that of the next.
    pub stride: usize,
    pub count: usize,
    pub rows: usize,
    pub cols: usize,
}

impl Stack {
    /// Elements of a matrix.
    pub fn range(&self, index: usize) -> Range<usize> {
        let start = self.first + index * self.stride;
        start..start + self.rows * self.cols
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum GroupedKind {
    Linear,
    LinearDx,
    LinearDw,
}

/// For each group of rows a product with the group's matrix, or of its rows with each other.
pub struct GroupedMatmul<'a> {
    pub(crate) kind: GroupedKind,
    pub(crate) groups: &'a RowGroups,
    pub(crate) stack: Stack,
    /// Rows.
    pub(crate) a: View<'a>,
    /// The buffer of the weights, or rows.
    pub(crate) b: View<'a>,
    /// Rows, or the buffer of the weights' gradients.
    pub(crate) out: ViewMut<'a>,
    /// Compute `out += …`.
    pub accumulate: bool,
}

impl<'a> GroupedMatmul<'a> {
    /// `out = x · wᵀ`. `weights` is the buffer that contains `stack`, matrices of (out, in).
    pub fn linear(
        groups: &'a RowGroups,
        (weights, stack): (View<'a>, Stack),
        x: View<'a>,
        out: ViewMut<'a>,
    ) -> GroupedMatmul<'a> {
        let kind = GroupedKind::Linear;
        GroupedMatmul { kind, groups, stack, a: x, b: weights, out, accumulate: false }
    }

    /// `dx = dy · w`.
    pub fn linear_dx(
        groups: &'a RowGroups,
        (weights, stack): (View<'a>, Stack),
        dy: View<'a>,
        dx: ViewMut<'a>,
    ) -> GroupedMatmul<'a> {
        let kind = GroupedKind::LinearDx;
        GroupedMatmul { kind, groups, stack, a: dy, b: weights, out: dx, accumulate: false }
    }

    /// `dw = dyᵀ · x`. `grads` is the buffer that contains `stack`. The gradient of an empty group is zero.
    pub fn linear_dw(
        groups: &'a RowGroups,
        (grads, stack): (ViewMut<'a>, Stack),
        dy: View<'a>,
        x: View<'a>,
    ) -> GroupedMatmul<'a> {
        let kind = GroupedKind::LinearDw;
        GroupedMatmul { kind, groups, stack, a: dy, b: x, out: grads, accumulate: false }
    }

    /// The product of one group.
    fn one(&mut self, index: usize, rows: Range<usize>) -> Matmul<'_> {
        let Stack { rows: outputs, cols: inputs, .. } = self.stack;
        let range = self.stack.range(index);
        let (a, out) = (self.a.rows_of(rows.clone()), self.out.reborrow());
        let weight = |weights: View<'a>| weights.part(range.clone()).shaped(outputs, inputs);
        match self.kind {
            GroupedKind::Linear => Matmul::linear(a, weight(self.b), out.rows_of(rows)),
            GroupedKind::LinearDx => Matmul::linear_dx(a, weight(self.b), out.rows_of(rows)),
            GroupedKind::LinearDw => {
                let dw = out.part(range).shaped(outputs, inputs);
                let accumulate = self.accumulate;
                Matmul { accumulate, ..Matmul::linear_dw(a, self.b.rows_of(rows), dw) }
            }
        }
    }

    /// The same product with another output.
    pub(crate) fn with_output<'b>(&'b self, out: ViewMut<'b>, stack: Stack) -> GroupedMatmul<'b> {
        GroupedMatmul { out, stack, ..*self }
    }

    /// # Panics
    /// If the shapes do not match.
    fn check(&self) {
        let Stack { rows, cols, count, .. } = self.stack;
        assert_eq!(count, self.groups.count(), "matrices and groups of rows");
        let [a, b] = match self.kind {
            GroupedKind::Linear => [cols, rows],
            GroupedKind::LinearDx | GroupedKind::LinearDw => [rows, cols],
        };
        let other = if self.kind == GroupedKind::LinearDw { &self.b } else { &self.out.as_view() };
        assert_eq!(
            [self.a.cols(), other.cols(), other.rows()],
            [a, b, self.a.rows()],
            "columns and rows of a grouped product with matrices of ({rows}, {cols})"
        );
    }
}

impl Device {
    /// One launch for all groups if the GPU has a kernel for it and it is faster than one product per group. The host then
    /// does not need to know the groups. Returns whether it was one launch.
    ///
    /// # Panics
    /// If the shapes do not match.
    pub fn grouped_matmul(&self, work: GroupedMatmul<'_>) -> bool {
        work.check();
        if let Backend::Cuda(cuda) = &self.0.backend
            && let Some(launch) = cuda::grouped::launch(cuda, &work, |work| self.matmul_each(work))
        {
            self.execute(OpClass::Matmul, |_| launch.enqueue(cuda));
            return true;
        }
        self.matmul_each(work);
        false
    }

    /// Fixes whether a GPU with a kernel for grouped products uses it; `None`: if it is faster, which is measured once.
    pub fn set_grouped_matmul(&self, on: Option<bool>) {
        match &self.0.backend {
            Backend::Cpu(_) => {}
            Backend::Cuda(cuda) => cuda.grouped.set(on),
        }
    }

    /// One product per group.
    fn matmul_each(&self, mut work: GroupedMatmul<'_>) {
        let groups = work.groups;
        for (index, bounds) in groups.on_host(self).windows(2).enumerate() {
            self.matmul(work.one(index, bounds[0] as usize..bounds[1] as usize));
        }
    }
}
