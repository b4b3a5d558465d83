//! A micro-batch in device memory.

use lockstep_kernels::{Device, Dtype, Tag, Tensor};
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
    /// Ids on their way to the device.
    ids: Vec<u32>,
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
        let (inputs, targets) = (empty(), Some(empty()));
        Batch { batch, runs, seq, inputs, targets, ids: Vec::with_capacity(tokens) }
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
        let (batch, seq) = (self.batch, self.seq);
        let expected = batch * (seq + 1);
        assert_eq!(samples.len(), expected, "{batch} samples of {seq} tokens and a target");
        // One copy each: on a GPU a copy costs microseconds, whatever its size.
        self.gather(samples, 0);
        device.write(self.inputs.view_mut(), &self.ids);
        self.gather(samples, 1);
        if let Some(targets) = &mut self.targets {
            device.write(targets.view_mut(), &self.ids);
        }
    }

    /// Collects the tokens `shift` after those of the runs, in the order of the batch.
    fn gather(&mut self, samples: &[u32], shift: usize) {
        self.ids.clear();
        for run in &self.runs {
            let (from, to) = (run.start + shift, run.start + run.len + shift);
            for sample in samples.chunks_exact(self.seq + 1) {
                self.ids.extend_from_slice(&sample[from..to]);
            }
        }
    }

    /// Tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.inputs.len()
    }
}
