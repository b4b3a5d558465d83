//! A micro-batch in device memory.

use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::context::Run;

/// Token ids and what should follow each, of a rank's positions of some sequences.
pub struct Batch {
    pub batch: usize,
    /// Tokens lie run by run, in each run sequence by sequence.
    pub runs: Vec<Run>,
    /// Tokens of a whole sequence.
    seq: usize,
    pub inputs: Tensor,  // (1, tokens), u32
    pub targets: Tensor, // (1, tokens), u32; u32::MAX where nothing is to be predicted
}

impl Batch {
    /// Room for `batch` sequences of `seq` tokens.
    pub fn empty(device: &Device, batch: usize, seq: usize) -> Batch {
        Batch::of_runs(device, batch, seq, vec![Run { start: 0, len: seq }])
    }

    /// Room for some positions of them.
    pub fn of_runs(device: &Device, batch: usize, seq: usize, runs: Vec<Run>) -> Batch {
        let tokens = batch * runs.iter().map(|run| run.len).sum::<usize>();
        let ids = || device.empty(1, tokens, Dtype::U32, Tag::Buffers);
        Batch { batch, runs, seq, inputs: ids(), targets: ids() }
    }

    /// From `batch` runs of `seq + 1` tokens each: inputs, and their successors as targets.
    pub fn fill(&mut self, device: &Device, samples: &[u32]) {
        let (batch, seq) = (self.batch, self.seq);
        assert_eq!(
            samples.len(),
            batch * (seq + 1),
            "{batch} samples of {seq} tokens and one more"
        );
        let mut at = 0;
        for run in &self.runs {
            for sample in samples.chunks_exact(seq + 1) {
                let (from, to) = (run.start, run.start + run.len);
                let place = at..at + run.len;
                device.write(self.inputs.view_mut().part(place.clone()), &sample[from..to]);
                device.write(self.targets.view_mut().part(place), &sample[from + 1..to + 1]);
                at += run.len;
            }
        }
    }

    /// That are here.
    pub fn tokens(&self) -> usize {
        self.inputs.len()
    }
}
