//! The passes for one number of ranks, and their average.

use lockstep_sim::{MeasuredMatmul, MeasuredStep, RankSkew};

use super::busy::MAX_OTHERS;
use super::pass::{COPY_BYTES, Pass, StepTimes};
use super::references;

/// Passes of a world of `ranks` ranks.
pub struct Passes {
    pub ranks: usize,
    pub all: Vec<Pass>,
}

/// Average of the valid passes.
pub struct Average {
    /// GB/s read plus written by a copy of each size of [`COPY_BYTES`], per rank.
    pub copy_gbs: [f64; 2],
    pub matmuls: Vec<MeasuredMatmul>,
    pub steps: Vec<MeasuredStep>,
    pub skew: RankSkew,
    /// Fraction of the cores used by other programs.
    pub others: f64,
}

impl Passes {
    pub fn new(ranks: usize) -> Passes {
        Passes { ranks, all: Vec::new() }
    }

    /// Number of passes that other programs did not disturb.
    pub fn undisturbed(&self) -> usize {
        self.all.iter().filter(|pass| pass.others <= MAX_OTHERS).count()
    }

    /// Averages the undisturbed passes if there are at least `rounds` of them, otherwise all passes.
    pub fn average(&self, rounds: usize) -> anyhow::Result<Average> {
        let enough = self.undisturbed() >= rounds;
        let is_valid = |pass: &&Pass| !enough || pass.others <= MAX_OTHERS;
        let valid: Vec<&Pass> = self.all.iter().filter(is_valid).collect();
        let average = |value: &dyn Fn(&Pass) -> f64| mean(valid.iter().map(|pass| value(pass)));
        let [cached, streamed] = [0, 1].map(|index| average(&|pass| pass.copies[index]));
        let gbs = |bytes: usize, seconds: f64| 2.0 * bytes as f64 / seconds / 1e9;
        let mut matmuls = valid[0].matmuls.clone();
        for (number, matmul) in matmuls.iter_mut().enumerate() {
            matmul.seconds = average(&|pass| pass.matmuls[number].seconds);
        }
        let mut steps = Vec::new();
        for (number, reference) in references::all(self.ranks)?.into_iter().enumerate() {
            let times: Vec<StepTimes> =
                valid.iter().flat_map(|pass| &pass.steps[number]).copied().collect();
            let at = |index: usize| mean(times.iter().map(|times| times.to_array()[index]));
            let StepTimes { step, comm, waiting, rest, by_operation } =
                StepTimes::from_array(std::array::from_fn(at));
            steps.push(MeasuredStep {
                plan: reference.plan,
                step,
                by: by_operation,
                comm,
                waiting,
                rest,
            });
        }
        Ok(Average {
            copy_gbs: [gbs(COPY_BYTES[0], cached), gbs(COPY_BYTES[1], streamed)],
            matmuls,
            steps,
            skew: RankSkew {
                computing: average(&|pass| pass.skew.computing),
                waiting: average(&|pass| pass.skew.waiting),
            },
            others: average(&|pass| pass.others),
        })
    }
}

/// The mean, not the median: a predicted step time is the sum of the times of its parts, slow and fast ones.
fn mean(all: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = all.len() as f64;
    all.sum::<f64>() / count
}
