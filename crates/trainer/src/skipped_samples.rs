//! Damaged samples: `data` has put others in their place, alike wherever they are asked for; here they are counted,
//! alike on all ranks, and end the run when they are too many. Adds no exchange to a step: the counts travel with
//! the sums of the loss.

use lockstep_data::{Damage, Source};
use lockstep_plan::Coord;

use crate::gather_texts::gather_texts;
use crate::{Error, Rank};

/// What a rank has found damaged among the samples of a step.
#[derive(Default)]
pub(crate) struct SkippedSamples {
    /// Samples of the global batch, and what of them is damaged.
    found: Vec<(usize, Damage)>,
    count: f64,
    /// Adds up to the same for who has left out the same samples.
    marks: f64,
}

impl SkippedSamples {
    /// Takes note of what was passed over to fill a sample.
    pub fn add(&mut self, index: usize, damage: Vec<Damage>) {
        // Endlessly many: no limit is as large, and nothing is learned from end tokens.
        let hopeless = damage.len() >= Source::MAX_SKIPPED;
        self.count += if hopeless { f64::INFINITY } else { damage.len() as f64 };
        // A whole number below 2^20, so that sums over ranks and samples are exact.
        let mark = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        self.marks += mark as f64 * damage.len() as f64;
        self.found.extend(damage.into_iter().map(|damage| (index, damage)));
    }

    pub fn clear(&mut self) {
        *self = SkippedSamples::default();
    }
}

impl Rank<'_> {
    /// What this rank adds to the sums of a step: what it counts, its marks, and those of who counts.
    pub(crate) fn skipped_sums(&self) -> [f64; 3] {
        let SkippedSamples { count, marks, .. } = self.in_flight.skipped;
        // Of all that read the same samples, one counts them.
        let counts = if is_first(self.groups.coord) { 1.0 } else { 0.0 };
        match count {
            0.0 => [0.0; 3],
            _ => [if counts > 0.0 { count } else { 0.0 }, marks, counts * marks],
        }
    }

    /// Takes note of what all ranks left out of a step: an error when it is too much, or when those that read the
    /// same samples do not agree. Nothing has been changed by the step yet.
    pub(crate) fn note_skipped(&mut self, step: u64, sums: [f64; 3]) -> Result<(), Error> {
        let [count, marks, first] = sums;
        if marks != first * self.readers() as f64 {
            return Err(self.disagreement(step));
        }
        let (so_far, limit) =
            (self.extra.skipped_samples as f64 + count, self.plan.data.max_corrupt);
        if so_far > limit as f64 {
            return Err(self.too_many(step, so_far, limit));
        }
        self.extra.skipped_samples += count as u64;
        Ok(())
    }

    /// How many ranks read the same samples: the ends of a pipeline need them.
    fn readers(&self) -> usize {
        let mesh = &self.groups.mesh;
        mesh.tensor * mesh.context * mesh.pipe.min(2)
    }

    fn too_many(&self, step: u64, count: f64, limit: usize) -> Error {
        let first = self.in_flight.skipped.found.first();
        let mine = first.map_or(String::new(), |(index, damage)| {
            format!("sample {index} of step {step}: {damage}")
        });
        let count = count.is_finite().then_some(count as u64);
        match gather_texts(self.group, &mine) {
            Ok(all) => {
                let what = all.into_iter().find(|text| !text.is_empty()).unwrap_or_default();
                Error::Corrupt { step, count, limit, what }
            }
            Err(error) => error,
        }
    }

    fn disagreement(&self, step: u64) -> Error {
        let found = self.in_flight.skipped.found.iter();
        let samples: Vec<String> = found.map(|(index, _)| index.to_string()).collect();
        match gather_texts(self.group, &samples.join(", ")) {
            Ok(all) => Error::Mistake(other_copies(step, &all, &|rank| {
                let coord = self.groups.mesh.coord(rank);
                let reads = coord.pipe == 0 || coord.pipe + 1 == self.groups.mesh.pipe;
                reads.then_some(coord.data)
            })),
            Err(error) => error,
        }
    }
}

fn is_first(coord: Coord) -> bool {
    (coord.pipe, coord.tensor, coord.context) == (0, 0, 0)
}

/// Names the first two ranks that read the same samples and left out others. `part` is which samples a rank reads.
fn other_copies(step: u64, said: &[String], part: &dyn Fn(usize) -> Option<usize>) -> String {
    let differ = |one: usize, other: usize| {
        part(one).is_some() && part(one) == part(other) && said[one] != said[other]
    };
    let pairs = (0..said.len()).flat_map(|other| (0..other).map(move |one| (one, other)));
    let Some((one, other)) = pairs.into_iter().find(|(one, other)| differ(*one, *other)) else {
        return format!("step {step}: ranks disagree on which samples are damaged");
    };
    let words = |rank: usize| match said[rank].as_str() {
        "" => "none".to_string(),
        samples => format!("samples {samples}"),
    };
    format!(
        "step {step}: rank {other} finds {} damaged, rank {one} {} of the same: their copies of the data differ; \
         compare them by `lockstep data inspect --check` on their hosts",
        words(other),
        words(one)
    )
}
