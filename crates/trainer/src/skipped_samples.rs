//! Corrupt samples: `data` replaces them by others, on all ranks in the same way; here they are counted, and the run
//! stops if there are too many. Adds no collective to a step: the counts are reduced together with the loss.

use lockstep_data::{Damage, Source};
use lockstep_plan::Coord;

use crate::gather_texts::gather_texts;
use crate::{Error, Rank};

/// Corrupt samples that a rank found in a step.
#[derive(Default)]
pub(crate) struct SkippedSamples {
    /// Index in the global batch, and the corrupt data.
    found: Vec<(usize, Damage)>,
    count: f64,
    /// Checksum of the skipped samples, to detect ranks that skipped different ones.
    checksum: f64,
}

impl SkippedSamples {
    /// Adds the corrupt candidates that were skipped to fill one sample.
    pub fn add(&mut self, index: usize, damage: Vec<Damage>) {
        // No intact candidate: exceeds every limit, because the sample consists of end tokens only.
        let exhausted = damage.len() >= Source::MAX_SKIPPED;
        self.count += if exhausted { f64::INFINITY } else { damage.len() as f64 };
        // An integer below 2^20, so that sums over ranks and samples are exact.
        let hash = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44;
        self.checksum += hash as f64 * damage.len() as f64;
        self.found.extend(damage.into_iter().map(|damage| (index, damage)));
    }

    /// Adds the samples that were found at another time.
    pub fn append(&mut self, other: SkippedSamples) {
        self.count += other.count;
        self.checksum += other.checksum;
        self.found.extend(other.found);
    }

    pub fn clear(&mut self) {
        *self = SkippedSamples::default();
    }
}

impl Rank<'_> {
    /// This rank's terms of the reduction: its count, its checksum, and its checksum if it is the counting rank.
    pub(crate) fn skipped_sums(&self) -> [f64; 3] {
        let SkippedSamples { count, checksum, .. } = self.in_flight.skipped;
        // One of the ranks that read the same samples counts them.
        let counts = if is_first(self.groups.coord) { 1.0 } else { 0.0 };
        match count {
            0.0 => [0.0; 3],
            _ => [if counts > 0.0 { count } else { 0.0 }, checksum, counts * checksum],
        }
    }

    /// Counts the samples that all ranks skipped in a step. Fails if there are too many, or if ranks that read the same
    /// samples skipped different ones. Called before the step changes any state.
    pub(crate) fn count_skipped(&mut self, step: u64, sums: [f64; 3]) -> Result<(), Error> {
        let [count, checksum, counted_checksum] = sums;
        if checksum != counted_checksum * self.readers() as f64 {
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

    /// Number of ranks that read the same samples. In a pipeline, the first and the last stage read them.
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
            Ok(all) => Error::Invalid(different_copies(step, &all, &|rank| {
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

/// Message with the first two ranks that read the same samples but skipped different ones. `skipped` has a list of
/// samples per rank, `replica` the replica whose samples a rank reads.
fn different_copies(
    step: u64,
    skipped: &[String],
    replica: &dyn Fn(usize) -> Option<usize>,
) -> String {
    let differ = |one: usize, other: usize| {
        replica(one).is_some() && replica(one) == replica(other) && skipped[one] != skipped[other]
    };
    let pairs = (0..skipped.len()).flat_map(|other| (0..other).map(move |one| (one, other)));
    let Some((one, other)) = pairs.into_iter().find(|(one, other)| differ(*one, *other)) else {
        return format!("step {step}: ranks disagree on which samples are corrupt");
    };
    let found = |rank: usize| match skipped[rank].as_str() {
        "" => "no samples".to_string(),
        samples => format!("samples {samples}"),
    };
    format!(
        "step {step}: rank {other} found {} corrupt, rank {one} found {}; their copies of the data differ. \
         Run `lockstep data inspect --check` on both hosts",
        found(other),
        found(one)
    )
}
