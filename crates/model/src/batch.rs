//! A micro-batch in device memory.

use lockstep_kernels::{Device, Dtype, Event, Tag, Tensor, Transfer};
use lockstep_plan::context::Run;

/// Token ids and targets of some sequences, at the positions of this rank.
pub struct Batch {
    /// Number of sequences.
    pub batch: usize,
    /// Positions of each sequence. Tokens are ordered by run, then by sequence.
    pub runs: Vec<Run>,
    /// Tokens of a whole sequence.
    pub seq: usize,
    pub inputs: Tensor, // (1, tokens), u32
    /// (1, tokens), u32; u32::MAX at positions without a target. Without targets, a model returns logits.
    pub targets: Option<Tensor>,
    /// Inputs and targets in host memory, on their way to the device.
    staged: [Tensor; 2],
    /// Copies from `staged` that the device's operations do not wait for yet.
    copying: Vec<Transfer>,
    /// The end of the last operations that use the buffer; none if it is free.
    last_use: Option<Event>,
}

impl Batch {
    /// A buffer for `batch` sequences of `seq` tokens.
    pub fn empty(device: &Device, batch: usize, seq: usize) -> Batch {
        Batch::of_runs(device, batch, seq, vec![Run { start: 0, len: seq }])
    }

    /// A buffer for some positions of `batch` sequences of `seq` tokens.
    pub fn of_runs(device: &Device, batch: usize, seq: usize, runs: Vec<Run>) -> Batch {
        let tokens = batch * runs.iter().map(|run| run.len).sum::<usize>();
        let empty = || device.empty(1, tokens, Dtype::U32, Tag::Buffers);
        let staged = [(); 2].map(|()| device.empty_host(1, tokens, Dtype::U32, Tag::Buffers));
        let (inputs, targets) = (empty(), Some(empty()));
        let (copying, last_use) = (Vec::with_capacity(2), None);
        Batch { batch, runs, seq, inputs, targets, staged, copying, last_use }
    }

    /// Tokens of one sequence from position `start`, without targets.
    pub(crate) fn prompt(device: &Device, start: usize, ids: &[u32]) -> Batch {
        let runs = vec![Run { start, len: ids.len() }];
        let mut batch = Batch { targets: None, ..Batch::of_runs(device, 1, ids.len(), runs) };
        device.write(batch.inputs.view_mut(), ids);
        batch
    }

    /// Fills the buffer from `batch` samples of `seq + 1` tokens each: the inputs, and their successors as targets.
    pub fn fill(&mut self, device: &Device, samples: &[u32]) {
        self.last_use = None;
        self.fill_ahead(device, samples);
        self.ready(device);
    }

    /// [`Batch::fill`] next to the device's operations: the copy waits only for those before the last
    /// [`Batch::release`]. Operations may use the buffer after [`Batch::ready`].
    pub fn fill_ahead(&mut self, device: &Device, samples: &[u32]) {
        let (batch, seq) = (self.batch, self.seq);
        let expected = batch * (seq + 1);
        assert_eq!(samples.len(), expected, "{batch} samples of {seq} tokens and a target");
        let free = self.last_use.take().unwrap_or_else(|| device.record());
        let Batch { runs, inputs, targets, staged, copying, .. } = self;
        // Staged ids that were never used, of a step that was not taken.
        copying.drain(..).for_each(|copy| drop(copy.wait()));
        let targets = targets.as_ref();
        for (shift, to) in [Some(&*inputs), targets].into_iter().enumerate() {
            let Some(to) = to else { continue };
            let from = &mut staged[shift];
            gather(runs, samples, seq + 1, shift, from.view_mut().host());
            // One copy each: on a GPU a copy costs microseconds, whatever its size.
            copying.push(device.transfer(from.clone(), 0..to.len(), to.clone(), 0, &free));
        }
    }

    /// Lets later operations wait until the buffer is filled.
    pub fn ready(&mut self, device: &Device) {
        for copy in &self.copying {
            device.wait_for(copy.done());
        }
    }

    /// Records that the operations so far are the last that use the contents.
    pub fn release(&mut self, device: &Device) {
        self.last_use = Some(device.record());
    }

    /// Tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.inputs.len()
    }
}

/// Collects the tokens `shift` after those of the runs, in the order of the batch, from samples of `len` tokens.
fn gather(runs: &[Run], samples: &[u32], len: usize, shift: usize, to: &mut [u32]) {
    let mut rest = to;
    for run in runs {
        for sample in samples.chunks_exact(len) {
            let (part, later) = rest.split_at_mut(run.len);
            part.copy_from_slice(&sample[run.start + shift..run.start + run.len + shift]);
            rest = later;
        }
    }
}
