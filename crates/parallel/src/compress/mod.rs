//! Gradients in fewer bytes along the data axis. Never loses anything for good: what rounding or selection leaves
//! behind is kept as an error and joins the next gradient (Seide et al., 1-bit SGD; Karimireddy et al., error
//! feedback). So over the steps the sum of what was applied is the sum of the gradients, up to the last errors.
//!
//! Two schemes:
//! - `rounded`: bf16, f16 and int8. Everybody sends every owner its share, rounded; the owner adds in f32 and
//!   everybody gets its sum, rounded once more. A number is rounded twice however many ranks there are.
//! - `chosen`: top-k. Everybody sends the elements that are largest beside what is usual in their places.
//!
//! Nothing lost is not yet learned as fast (Stich et al., Sparsified SGD with Memory): of the k largest, what is sent
//! comes late, summed up over the steps that it waited for. Two things make up for it, both of Lin et al. (Deep
//! Gradient Compression) and both the plan's to say, as they are no matter of one sum: the first steps, in which
//! gradients still turn quickly, send all of them (`comm.compression_warmup`), and no momentum is put on top of the
//! waiting (`Plan::beta1`). And largest is meant as Adam means it: an element beside the root of the mean square of
//! what came from its place before. By their plain size, those of the embedding and of norms would come all the
//! time, and those of a matrix whose gradients are small would wait for ever, though a step moves them as far.
//! The means are of what this rank has sent, so that they are known wherever ZeRO keeps the second moments.
//!
//! A NaN or an infinity in anybody's gradient comes out of the sum as NaN or infinity on all ranks; in f16 and int8 it
//! takes the scale, and so the numbers, of its chunk with it. It is never kept as an error.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_kernels::Device;
//! use lockstep_parallel::compress::Compressor;
//! use lockstep_plan::Compression;
//!
//! // Of 100 elements each rank sends one.
//! let steps = on_threads(2, |world| {
//!     let how = Compression::TopK(0.01);
//!     let mut compressor = Compressor::new(&Device::cpu(1), how, 100, world.size());
//!     [0; 2].map(|_| {
//!         let mut gradient = vec![0.0; 100];
//!         (gradient[3], gradient[7]) = (1.0, 0.75);
//!         compressor.all_reduce(&world, &mut gradient).unwrap();
//!         (gradient[3], gradient[7])
//!     })
//! });
//! // What had to wait the first time comes with the second gradient.
//! assert_eq!(steps, [[(2.0, 0.0), (0.0, 3.0)]; 2]);
//! ```

mod chosen;
mod cost;
mod rounded;

pub use cost::{Exchange, exchanges, sent};

use lockstep_comm::{Group, Op, Result, bytes_of_mut};
use lockstep_kernels::{Code, Device, Dtype, Tag, Tensor};
use lockstep_plan::Compression;
use std::ops::Range;

/// Something that a rank remembers of its gradients from step to step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// What was not sent yet. What all ranks owe adds up to what the model is still owed: on another number of ranks
    /// any split that keeps this sum will do.
    Owed,
    /// Of the k largest, means of the squares of what was sent from each place. Only how they compare matters: on
    /// another number of ranks their sum will do.
    Usual,
}

/// Sums one buffer over a group, step after step, in the form that a plan asks for.
pub struct Compressor {
    device: Device,
    how: Compression,
    /// The form of the sums to come.
    now: Compression,
    ranks: usize,
    len: usize,
    /// (len): what was not sent yet; of the k largest twice as long, with means of the squares of what was. Empty where
    /// nothing gets lost.
    state: Tensor,
}

impl Compressor {
    /// For a buffer of `len` elements and a group of `ranks`. Alone nothing is sent, so nothing is lost.
    pub fn new(device: &Device, how: Compression, len: usize, ranks: usize) -> Compressor {
        let how = if ranks == 1 { Compression::None } else { how };
        let rows = match form(how) {
            Form::Whole => 0,
            Form::Rounded(_) => 1,
            Form::Chosen(_) => 2,
        };
        let state = device.zeros(1, rows * len, Dtype::F32, Tag::Buffers);
        Compressor { device: device.clone(), how, now: how, ranks, len, state }
    }

    /// Sends whole numbers for now, or again in the form that it was made for. What is owed stays so meanwhile.
    pub fn whole_for_now(&mut self, yes: bool) {
        self.now = if yes { Compression::None } else { self.how };
    }

    /// `buffer` becomes the sum over the group, the same bits on all ranks.
    ///
    /// Rounded to b bytes: 2(P-1) steps, 2(P-1)/P · len · b bytes per rank. The k largest: P-1 steps, (P-1) · 8k bytes
    /// per rank. [`sent`] is exact.
    pub fn all_reduce(&mut self, group: &Group, buffer: &mut [f32]) -> Result<()> {
        self.check(group, buffer.len());
        self.follow(buffer);
        match form(self.now) {
            Form::Whole => group.all_reduce(buffer, Op::Sum),
            Form::Rounded(code) => rounded::all_reduce(self.rounded(group, code), buffer),
            Form::Chosen(fraction) => chosen::all_reduce(self.chosen(group, fraction), buffer),
        }
    }

    /// `output` becomes our share (`lockstep_comm::shard_range`) of the sum of `input` over the group.
    ///
    /// Rounded: the first half of [`Compressor::all_reduce`], and one rounding less. The k largest: P-1 steps, and
    /// each owner gets only what is in its share, (P-1)/P · 8k bytes per rank when they are spread evenly, after P-1
    /// steps in which the ranks say how much.
    pub fn reduce_scatter(
        &mut self,
        group: &Group,
        input: &[f32],
        output: &mut [f32],
    ) -> Result<()> {
        self.check(group, input.len());
        self.follow(input);
        match form(self.now) {
            Form::Whole => group.reduce_scatter(input, output, Op::Sum),
            Form::Rounded(code) => {
                rounded::reduce_scatter(self.rounded(group, code), input, output)
            }
            Form::Chosen(fraction) => {
                chosen::reduce_scatter(self.chosen(group, fraction), input, output)
            }
        }
    }

    /// What this rank has not sent yet; empty where nothing gets lost.
    pub fn error(&self) -> &[f32] {
        self.remembered(Memory::Owed)
    }

    /// What it remembers from step to step, if it does. State of the training, like the moments of an optimizer: a run
    /// that is resumed without it is off by one step's rounding or selection.
    pub fn remembered(&self, what: Memory) -> &[f32] {
        &self.state.view().host()[self.place(what)]
    }

    /// To load it.
    pub fn remembered_mut(&mut self, what: Memory) -> &mut [f32] {
        let place = self.place(what);
        &mut self.state.view_mut().host()[place]
    }

    /// Where it lies; an empty place where there is none.
    fn place(&self, what: Memory) -> Range<usize> {
        let all = self.state.view().len();
        match what {
            Memory::Owed => 0..self.len.min(all),
            Memory::Usual => self.len.min(all)..all,
        }
    }

    /// While all is sent, what is usual of it is learned for the time when not all is.
    fn follow(&mut self, x: &[f32]) {
        if let (Form::Chosen(_), Form::Whole) = (form(self.how), form(self.now)) {
            let squares = &mut self.state.view_mut().host()[self.len..];
            self.device.follow_squares(x, squares);
        }
    }

    fn check(&self, group: &Group, len: usize) {
        assert_eq!(self.ranks, group.size(), "a compressor is made for a number of ranks");
        assert_eq!(self.len, len, "a compressor is made for one buffer");
    }

    fn rounded<'a>(&'a mut self, group: &'a Group, code: Code) -> rounded::Work<'a> {
        rounded::Work { device: &self.device, group, code, error: self.state.view_mut().host() }
    }

    fn chosen<'a>(&'a mut self, group: &'a Group, fraction: f64) -> chosen::Work<'a> {
        let k = chosen_of(fraction, self.len);
        let (error, squares) = self.state.view_mut().host().split_at_mut(self.len);
        chosen::Work { device: &self.device, group, k, error, squares }
    }
}

/// What a compression comes down to.
enum Form {
    Whole,
    Rounded(Code),
    Chosen(f64),
}

fn form(how: Compression) -> Form {
    match how {
        Compression::None => Form::Whole,
        Compression::Bf16 => Form::Rounded(Code::Bf16),
        Compression::F16 => Form::Rounded(Code::F16),
        Compression::Int8 => Form::Rounded(Code::Int8),
        Compression::TopK(fraction) => Form::Chosen(fraction),
    }
}

/// How many elements a fraction is: at least one of a buffer that has any.
fn chosen_of(fraction: f64, len: usize) -> usize {
    ((fraction * len as f64).ceil() as usize).clamp(len.min(1), len)
}

/// Room for `bytes` out of the device's pool: between two steps it is somebody else's.
fn room(device: &Device, bytes: usize) -> Tensor {
    device.empty(1, bytes.div_ceil(4), Dtype::F32, Tag::Buffers)
}

fn bytes(room: &mut Tensor) -> &mut [u8] {
    bytes_of_mut(room.view_mut().host::<f32>())
}
