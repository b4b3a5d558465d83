//! Passes of so many ranks, spread over time, and what they come to together. Starts no ranks itself.

use lockstep_sim::{MeasuredMatmul, MeasuredStep, RankSkew};

use super::busy::TOLERATED;
use super::pass::{COPIED, Pass, Row};
use super::references;

/// What was seen of a machine that so many ranks share.
pub struct Passes {
    pub ranks: usize,
    pub all: Vec<Pass>,
}

/// What the passes that count come to.
pub struct Watched {
    /// GB/s of a rank that copies what its cache holds, and what none does: read and written.
    pub copied: [f64; 2],
    pub multiplies: Vec<MeasuredMatmul>,
    pub steps: Vec<MeasuredStep>,
    pub together: RankSkew,
    /// Of the cores, what other programs took.
    pub others: f64,
}

impl Passes {
    pub fn new(ranks: usize) -> Passes {
        Passes { ranks, all: Vec::new() }
    }

    /// Passes in which nobody else worked.
    pub fn quiet(&self) -> usize {
        self.all.iter().filter(|pass| pass.others <= TOLERATED).count()
    }

    /// Those with nobody else count, where there are `rounds` of them; otherwise all.
    pub fn together(&self, rounds: usize) -> anyhow::Result<Watched> {
        let enough = self.quiet() >= rounds;
        let counts = |pass: &&Pass| !enough || pass.others <= TOLERATED;
        let counted: Vec<&Pass> = self.all.iter().filter(counts).collect();
        let of = |seconds: &dyn Fn(&Pass) -> f64| mean(counted.iter().map(|pass| seconds(pass)));
        let [cached, streamed] = [0, 1].map(|at| of(&|pass| pass.copies[at]));
        let gbs = |bytes: usize, seconds: f64| 2.0 * bytes as f64 / seconds / 1e9;
        let mut multiplies = counted[0].multiplies.clone();
        for (number, multiply) in multiplies.iter_mut().enumerate() {
            multiply.seconds = of(&|pass| pass.multiplies[number].seconds);
        }
        let mut steps = Vec::new();
        for (number, reference) in references::all(self.ranks)?.into_iter().enumerate() {
            let rows: Vec<Row> =
                counted.iter().flat_map(|pass| &pass.steps[number]).copied().collect();
            let at = |place: usize| mean(rows.iter().map(|row| row.numbers()[place]));
            let Row { step, exchange, waiting, rest, by } = Row::of(std::array::from_fn(at));
            steps.push(MeasuredStep {
                plan: reference.plan,
                step,
                by,
                comm: exchange,
                waiting,
                rest,
            });
        }
        Ok(Watched {
            copied: [gbs(COPIED[0], cached), gbs(COPIED[1], streamed)],
            multiplies,
            steps,
            together: RankSkew {
                computing: of(&|pass| pass.together.computing),
                waiting: of(&|pass| pass.together.waiting),
            },
            others: counted.iter().map(|pass| pass.others).sum::<f64>() / counted.len() as f64,
        })
    }
}

/// What a step takes is the sum of what its parts take, slow and fast: so is what is predicted of it. A median would
/// take the side of whichever is more frequent.
fn mean(all: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = all.len() as f64;
    all.sum::<f64>() / count
}
