//! Overlap on the tensor axis: with sequence parallelism, gathered rows are multiplied rank by rank as they arrive, and
//! partial sums are sent to their owner as soon as they are computed. The rows of one rank are in flight while those of
//! another are computed (as in Wang et al., Overlap Communication with Dependent Computation).
//! Decides nothing about the computation: the caller passes it in.
//!
//! ```text
//! gather_sequence  rank 1 of 3:  multiply own rows │ rows of 0 │ rows of 2   own rows go to 2, then to 0
//! reduce_output                  compute rows of 2 │ rows of 0 │ own rows    each goes to its owner
//! ```
//!
//! A row of a product has the same bits whichever other rows are computed with it, unless there are so few that another
//! kernel is used; those are not overlapped. The owner of the rows sums in rank order and in f32, as `lockstep_comm`
//! does on one host. So the result is the same to the bit.

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::SMALL_GEMM_ROWS;
use std::ops::Range;

use crate::Groups;
use crate::collectives::{Transfer, start_receive, start_send};

/// The residual stream's rows of all tokens, local or in flight.
pub struct SequenceGather<'p> {
    groups: &'p Groups,
    device: &'p Device,
    rows: Rows,
}

enum Rows {
    /// All rows.
    Gathered(Tensor),
    /// This rank's rows; an all-gather fetches the others when they are needed.
    Own(Tensor),
    /// This rank's rows, while those of the first peer are in flight.
    InFlight(Tensor, Exchange),
}

/// Shape of an output for all tokens that is summed over the tensor ranks.
#[derive(Clone, Copy)]
pub struct PartialOutput {
    /// All tokens.
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
    /// The tag of the sum.
    pub tag: Tag,
}

/// One step: rows go to one rank and come from another.
struct Exchange {
    send: Transfer,
    receive: Transfer,
}

impl Groups {
    /// Starts `gather_sequence`.
    pub fn start_gather_sequence<'p>(
        &'p self,
        device: &'p Device,
        own: Tensor,
    ) -> SequenceGather<'p> {
        let rows = match self.overlaps(own.rows()) {
            true => {
                let exchange = self.exchange_rows(device, 1, &own);
                Rows::InFlight(own, exchange)
            }
            false => Rows::Own(own),
        };
        SequenceGather { groups: self, device, rows }
    }

    /// A gather that is complete.
    pub fn gathered_sequence<'p>(&'p self, device: &'p Device, all: Tensor) -> SequenceGather<'p> {
        SequenceGather { groups: self, device, rows: Rows::Gathered(all) }
    }

    /// Computes an output and reduces it, as `reduce_output` and `gather_sequence_backward` do: `compute` is called
    /// with ranges of rows and a buffer for this rank's partial sums of them, once or rank by rank.
    ///
    /// P-1 messages of 1/P of the rows; without overlap, one reduce-scatter or all-reduce of all.
    pub fn reduce_output_with(
        &self,
        device: &Device,
        output: PartialOutput,
        mut compute: impl FnMut(Range<usize>, ViewMut<'_>),
    ) -> Tensor {
        let PartialOutput { rows, cols, dtype, tag } = output;
        let each = rows / self.mesh.tensor;
        if !self.overlaps(each) {
            let partial_tag = if self.sequence { Tag::Buffers } else { tag };
            let mut y = device.empty(rows, cols, dtype, partial_tag);
            compute(0..rows, y.view_mut());
            return self.reduce_partial(device, y, tag);
        }
        let group = self.tensor();
        let (me, ranks) = (group.rank(), group.size());
        let mut partial = |owner: usize| {
            let mut partial = device.empty(each, cols, dtype, Tag::Buffers);
            compute(owner * each..(owner + 1) * each, partial.view_mut());
            partial
        };
        let in_flight: Vec<Exchange> = (1..ranks)
            .map(|step| {
                let partial = partial((me + step) % ranks);
                let buffer = device.empty(each, cols, dtype, Tag::Buffers);
                Exchange::start(device, group, step, [partial, buffer])
            })
            .collect();
        let own = partial(me);
        let mut partials: Vec<Option<Tensor>> = (0..ranks).map(|_| None).collect();
        partials[me] = Some(own);
        for (step, exchange) in in_flight.into_iter().enumerate() {
            let from = (me + ranks - step - 1) % ranks;
            partials[from] = self.wait_for_rows(exchange);
        }
        sum(device, &output, each, partials.iter().flatten())
    }

    /// Whether communication is overlapped, for `each` rows per rank.
    fn overlaps(&self, each: usize) -> bool {
        self.sequence && self.overlap && each > SMALL_GEMM_ROWS
    }

    /// Sends the own rows to the rank `step` after this one, and receives those of the rank `step` before.
    fn exchange_rows(&self, device: &Device, step: usize, own: &Tensor) -> Exchange {
        let buffer = device.empty(own.rows(), own.cols(), own.dtype(), Tag::Buffers);
        Exchange::start(device, self.tensor(), step, [own.clone(), buffer])
    }

    /// Calls `work` with the rows of every rank: its own first, then the others as they arrive.
    fn for_each_rank(
        &self,
        device: &Device,
        own: Tensor,
        first: Exchange,
        work: &mut dyn FnMut(Range<usize>, View<'_>),
    ) {
        let (group, each) = (self.tensor(), own.rows());
        let (me, ranks) = (group.rank(), group.size());
        let range = |rank: usize| rank * each..(rank + 1) * each;
        work(range(me), own.view());
        let mut exchange = Some(first);
        for step in 1..ranks {
            let arrived = exchange.take().and_then(|exchange| self.wait_for_rows(exchange));
            // The next rows are in flight while these are computed.
            exchange = (step + 1 < ranks).then(|| self.exchange_rows(device, step + 1, &own));
            if let Some(rows) = arrived {
                work(range((me + ranks - step) % ranks), rows.view());
            }
        }
    }

    /// The received rows; none after a failure, which is recorded.
    fn wait_for_rows(&self, exchange: Exchange) -> Option<Tensor> {
        self.timed(CommAxis::Tensor, || exchange.wait())
            .map_err(|error| self.record(Err(error)))
            .ok()
    }
}

impl SequenceGather<'_> {
    /// Calls `work` with all rows: once, or rank by rank, starting with this rank's own.
    ///
    /// P-1 messages of this rank's rows; without overlap, one all-gather, or nothing if all rows are here.
    pub fn for_each(self, mut work: impl FnMut(Range<usize>, View<'_>)) {
        match self.rows {
            Rows::InFlight(own, first) => {
                self.groups.for_each_rank(self.device, own, first, &mut work)
            }
            _ => {
                let all = self.wait();
                work(0..all.rows(), all.view());
            }
        }
    }

    /// Calls `work` like `for_each`, and returns all rows.
    pub fn for_each_and_gather(self, mut work: impl FnMut(Range<usize>, View<'_>)) -> Tensor {
        let SequenceGather { groups, device, rows } = self;
        match rows {
            Rows::InFlight(own, first) => {
                let rows = own.rows() * groups.mesh.tensor;
                let mut all = device.empty(rows, own.cols(), own.dtype(), Tag::Buffers);
                groups.for_each_rank(device, own, first, &mut |range, rows| {
                    work(range.clone(), rows);
                    device.copy(rows, all.view_mut().rows_of(range));
                });
                all
            }
            Rows::Gathered(all) => {
                work(0..all.rows(), all.view());
                all
            }
            Rows::Own(own) => {
                let all = groups.gather_sequence(device, own);
                work(0..all.rows(), all.view());
                all
            }
        }
    }

    /// All rows.
    pub fn wait(self) -> Tensor {
        self.for_each_and_gather(|_, _| {})
    }

    /// Whether rows are in flight, so that the caller may compute something else first.
    pub fn in_flight(&self) -> bool {
        matches!(self.rows, Rows::InFlight(..))
    }
}

impl Exchange {
    fn start(device: &Device, group: &Group, step: usize, [rows, buffer]: [Tensor; 2]) -> Exchange {
        let (me, ranks) = (group.rank(), group.size());
        Exchange {
            send: start_send(device, group, rows, (me + step) % ranks),
            receive: start_receive(device, group, buffer, (me + ranks - step) % ranks),
        }
    }

    fn wait(self) -> Result<Tensor> {
        self.send.wait()?;
        self.receive.wait()
    }
}

/// Sums the partial rows of all ranks, in rank order.
fn sum<'a>(
    device: &Device,
    output: &PartialOutput,
    rows: usize,
    mut partials: impl Iterator<Item = &'a Tensor>,
) -> Tensor {
    let PartialOutput { cols, dtype, tag, .. } = *output;
    let is_f32 = dtype == Dtype::F32;
    let mut sum = device.empty(rows, cols, Dtype::F32, if is_f32 { tag } else { Tag::Buffers });
    let first = partials.next().expect("this rank has its own partial sum");
    device.cast(first.view(), sum.view_mut());
    partials.for_each(|partial| device.add_columns(partial.view(), 0..cols, sum.view_mut(), 0));
    if is_f32 {
        return sum;
    }
    let mut rounded = device.empty(rows, cols, dtype, tag);
    device.cast(sum.view(), rounded.view_mut());
    rounded
}
