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
}

impl Batch {
    /// A buffer for `batch` sequences of `seq` tokens.
    pub fn empty(device: &Device, batch: usize, seq: usize) -> Batch {
        Batch::of_runs(device, batch, seq, vec![Run { start: 0, len: seq }])
    }

    /// A buffer for some positions of `batch` sequences of `seq` tokens.
    pub fn of_runs(device: &Device, batch: usize, seq: usize, runs: Vec<Run>) -> Batch {
        let tokens = batch * runs.iter().map(|run| run.len).sum::<usize>();
        let ids = || device.empty(1, tokens, Dtype::U32, Tag::Buffers);
        Batch { batch, runs, seq, inputs: ids(), targets: Some(ids()) }
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
        let mut at = 0;
        for run in &self.runs {
            for sample in samples.chunks_exact(seq + 1) {
                let (from, to) = (run.start, run.start + run.len);
                let place = at..at + run.len;
                device.write(self.inputs.view_mut().part(place.clone()), &sample[from..to]);
                if let Some(targets) = &mut self.targets {
                    device.write(targets.view_mut().part(place), &sample[from + 1..to + 1]);
                }
                at += run.len;
            }
        }
    }

    /// Tokens on this rank.
    pub fn tokens(&self) -> usize {
        self.inputs.len()
    }
}
