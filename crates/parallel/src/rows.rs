//! The tensor axis where the wire does the work: with sequence parallelism, what is gathered is multiplied rank by
//! rank as it comes, and what is to be summed goes to its owner as soon as it is computed. So one rank's rows travel
//! while another's are worked on (as in Wang et al., Overlap Communication with Dependent Computation).
//! Decides nothing about what is computed: it is told what to do with some rows.
//!
//! ```text
//! enter  rank 1 of 3:  multiply own rows │ rows of 0      │ rows of 2          own rows go to 2, then to 0
//! leave                make rows of 2    │ rows of 0      │ own rows           each goes to its owner, own rows stay
//! ```
//!
//! A row of a product is the same bits whichever others are computed with it, but where these are so few that another
//! kernel does them, which are waited for; and sums are made by the owner of the rows, in the order of the ranks and in
//! f32, as `lockstep_comm` makes them on one host. So it is the same training to the bit.

use lockstep_comm::{Group, Pending, Result, bytes_of, bytes_of_mut};
use lockstep_kernels::{Device, Dtype, Tag, Tensor, View, ViewMut};
use lockstep_plan::FEW_ROWS;
use std::ops::Range;

use crate::Groups;

/// The stream's rows of all tokens, here or on their way.
pub struct Entering<'p> {
    groups: &'p Groups,
    device: &'p Device,
    rows: Rows,
}

enum Rows {
    /// All of them.
    Here(Tensor),
    /// This rank's own; the others are asked for when they are wanted.
    Own(Tensor),
    /// This rank's own, while the first of the others' come.
    Travelling(Tensor, Passing),
}

/// Sums for all tokens that are to be made of ranks' parts of them.
#[derive(Clone, Copy)]
pub struct Leaving {
    /// All tokens.
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
    /// Of the sum.
    pub tag: Tag,
}

/// In a step, rows go to one rank and come from another.
struct Passing {
    sent: Pending<Result<Bytes>>,
    coming: Pending<Result<Bytes>>,
}

/// A tensor as a started call takes it. What is sent may have other handles, to read it in the meantime; what is
/// received must not.
struct Bytes(Tensor);

impl Groups {
    /// Begins to bring this rank's rows of the stream together with those of its peers, for all tokens.
    pub fn start_enter<'p>(&'p self, device: &'p Device, own: Tensor) -> Entering<'p> {
        let rows = match self.by_rows(own.rows()) {
            true => {
                let passing = self.pass(device, 1, &own);
                Rows::Travelling(own, passing)
            }
            false => Rows::Own(own),
        };
        Entering { groups: self, device, rows }
    }

    /// Rows that have all entered.
    pub fn entered<'p>(&'p self, device: &'p Device, all: Tensor) -> Entering<'p> {
        Entering { groups: self, device, rows: Rows::Here(all) }
    }

    /// As `leave` and `enter_backward`, for what is yet to be computed: `make` is called with runs of rows and room for this
    /// rank's parts of them, at once or rank by rank.
    ///
    /// P-1 messages of 1/P of the rows; otherwise one reduce-scatter or all-reduce of all.
    pub fn leave_with(
        &self,
        device: &Device,
        leaving: Leaving,
        mut make: impl FnMut(Range<usize>, ViewMut<'_>),
    ) -> Tensor {
        let Leaving { rows, cols, dtype, tag } = leaving;
        if !self.by_rows(rows / self.mesh.tensor) {
            let at_once = if self.sequence { Tag::Buffers } else { tag };
            let mut y = device.empty(rows, cols, dtype, at_once);
            make(0..rows, y.view_mut());
            return self.summed(device, y, tag);
        }
        let (group, each) = (self.tensor(), rows / self.mesh.tensor);
        let (me, ranks) = (group.rank(), group.size());
        let mut part = |owner: usize| {
            let mut part = device.empty(each, cols, dtype, Tag::Buffers);
            make(owner * each..(owner + 1) * each, part.view_mut());
            part
        };
        let under_way: Vec<Passing> = (1..ranks)
            .map(|step| {
                let part = part((me + step) % ranks);
                let room = device.empty(each, cols, dtype, Tag::Buffers);
                Passing::start(group, step, part, room)
            })
            .collect();
        let own = part(me);
        // In the order of the ranks; the step in which each one's part came follows from it.
        let mut parts: Vec<Option<Tensor>> = (0..ranks).map(|_| None).collect();
        parts[me] = Some(own);
        for (step, passing) in under_way.into_iter().enumerate() {
            let from = (me + ranks - step - 1) % ranks;
            parts[from] = self.arrived(passing);
        }
        sum(device, &leaving, each, parts.iter().flatten())
    }

    /// Whether rows, so many of each rank, travel while others are multiplied.
    fn by_rows(&self, each: usize) -> bool {
        self.sequence && self.beside && each > FEW_ROWS
    }

    /// The step-th exchange: own rows go to the rank so far after, and those of the rank as far before come.
    fn pass(&self, device: &Device, step: usize, own: &Tensor) -> Passing {
        let room = device.empty(own.rows(), own.cols(), own.dtype(), Tag::Buffers);
        Passing::start(self.tensor(), step, own.clone(), room)
    }

    /// Every rank's rows, this rank's own first and then as they come.
    fn travel(
        &self,
        device: &Device,
        own: Tensor,
        first: Passing,
        work: &mut dyn FnMut(Range<usize>, View<'_>),
    ) {
        let (group, each) = (self.tensor(), own.rows());
        let (me, ranks) = (group.rank(), group.size());
        let place = |rank: usize| rank * each..(rank + 1) * each;
        work(place(me), own.view());
        let mut passing = Some(first);
        for step in 1..ranks {
            let came = passing.take().and_then(|passing| self.arrived(passing));
            // The next are under way before these are worked on.
            passing = (step + 1 < ranks).then(|| self.pass(device, step + 1, &own));
            if let Some(rows) = came {
                work(place((me + ranks - step) % ranks), rows.view());
            }
        }
    }

    /// What came; none after a failure, which is noted: the pass goes on without, and is refused at its end.
    fn arrived(&self, passing: Passing) -> Option<Tensor> {
        let came = self.exchanged(|| {
            passing.sent.wait()?;
            passing.coming.wait()
        });
        came.map_err(|error| self.note(Err(error))).ok().map(|Bytes(rows)| rows)
    }
}

impl Entering<'_> {
    /// Does `work` on all rows: at once, or rank by rank, on this rank's own first.
    ///
    /// P-1 messages of this rank's rows; otherwise one all-gather, or nothing where they are all here.
    pub fn each(self, mut work: impl FnMut(Range<usize>, View<'_>)) {
        match self.rows {
            Rows::Travelling(own, first) => self.groups.travel(self.device, own, first, &mut work),
            _ => {
                let all = self.all();
                work(0..all.rows(), all.view());
            }
        }
    }

    /// The same, and gives all rows.
    pub fn each_of_all(self, mut work: impl FnMut(Range<usize>, View<'_>)) -> Tensor {
        let Entering { groups, device, rows } = self;
        match rows {
            Rows::Travelling(own, first) => {
                let rows = own.rows() * groups.mesh.tensor;
                let mut all = device.empty(rows, own.cols(), own.dtype(), Tag::Buffers);
                groups.travel(device, own, first, &mut |place, rows| {
                    work(place.clone(), rows);
                    device.copy(rows, all.view_mut().rows_of(place));
                });
                all
            }
            Rows::Here(all) => {
                work(0..all.rows(), all.view());
                all
            }
            Rows::Own(own) => {
                let all = groups.enter(device, own);
                work(0..all.rows(), all.view());
                all
            }
        }
    }

    /// All rows.
    pub fn all(self) -> Tensor {
        self.each_of_all(|_, _| {})
    }

    /// Whether rows are on their way, so that there is time for something else.
    pub fn travels(&self) -> bool {
        matches!(self.rows, Rows::Travelling(..))
    }
}

impl Passing {
    fn start(group: &Group, step: usize, rows: Tensor, room: Tensor) -> Passing {
        let (me, ranks) = (group.rank(), group.size());
        Passing {
            sent: group.start_send::<u8, _>(Bytes(rows), (me + step) % ranks),
            coming: group.start_receive::<u8, _>(Bytes(room), (me + ranks - step) % ranks),
        }
    }
}

/// The sum of ranks' parts of some rows.
fn sum<'a>(
    device: &Device,
    leaving: &Leaving,
    rows: usize,
    mut parts: impl Iterator<Item = &'a Tensor>,
) -> Tensor {
    let Leaving { cols, dtype, tag, .. } = *leaving;
    let narrow = dtype != Dtype::F32;
    let mut whole = device.empty(rows, cols, Dtype::F32, if narrow { Tag::Buffers } else { tag });
    let first = parts.next().expect("this rank has a part");
    device.cast(first.view(), whole.view_mut());
    parts.for_each(|part| device.add_columns(part.view(), 0..cols, whole.view_mut(), 0));
    if !narrow {
        return whole;
    }
    let mut rounded = device.empty(rows, cols, dtype, tag);
    device.cast(whole.view(), rounded.view_mut());
    rounded
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        match self.0.dtype() {
            Dtype::Bf16 => bytes_of(self.0.view().host::<half::bf16>()),
            _ => bytes_of(self.0.view().host::<f32>()),
        }
    }
}

impl AsMut<[u8]> for Bytes {
    fn as_mut(&mut self) -> &mut [u8] {
        match self.0.dtype() {
            Dtype::Bf16 => bytes_of_mut(self.0.view_mut().host::<half::bf16>()),
            _ => bytes_of_mut(self.0.view_mut().host::<f32>()),
        }
    }
}
