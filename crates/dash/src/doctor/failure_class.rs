//! Whether a failure would happen again: judged by its text, by earlier failures of the run, and by replays of the step.

use serde::Serialize;

use super::failure::FailureKind;
use crate::{FailureRecord, RunFolder};

/// Whether a failure would happen again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The same step fails again.
    Deterministic,
    /// Samples of the data cause it.
    DataDependent,
    /// A rank, a host, a link or the storage.
    Infrastructure,
    Unknown,
}

impl FailureClass {
    pub fn name(self) -> &'static str {
        match self {
            FailureClass::Deterministic => "deterministic: it would happen again",
            FailureClass::DataDependent => "data-dependent: caused by samples",
            FailureClass::Infrastructure => "infrastructure: a rank, a host, a link or the storage",
            FailureClass::Unknown => "unknown",
        }
    }
}

/// The class of a failure, and what speaks for it.
pub(super) struct Classified {
    pub class: FailureClass,
    pub reason: Option<String>,
    /// Samples that cause it: `sample 3 of step 12`.
    pub samples: Vec<String>,
    /// The step was replayed.
    replayed: bool,
}

impl Classified {
    /// The next action for a step that is not finite, once it was replayed.
    pub fn action_after_replay(&self) -> Option<&'static str> {
        match self.class {
            _ if !self.replayed => None,
            FailureClass::DataDependent => Some(
                "look at these samples with `lockstep data inspect --document`, and prepare the data without them",
            ),
            FailureClass::Infrastructure => Some(
                "test or replace the host of the rank; --resume continues from the newest checkpoint",
            ),
            _ => Some("try a lower train.lr, a longer train.warmup or a smaller train.clip"),
        }
    }
}

/// Classifies a failure. `guess` is the class of its kind, `message` the line that names the cause.
pub(super) fn classify(
    run: &RunFolder,
    kind: FailureKind,
    guess: FailureClass,
    message: &str,
) -> Classified {
    let found = |class, reason: String, samples| Classified {
        class,
        reason: Some(reason),
        samples,
        replayed: true,
    };
    let step = failed_step(message);
    let replay = run.replays.iter().rev().find(|replay| Some(replay.step) == step);
    if let Some(replay) = replay.filter(|_| kind == FailureKind::NotFinite) {
        let step = replay.step;
        let samples: Vec<String> =
            replay.samples.iter().map(|sample| format!("sample {sample} of step {step}")).collect();
        return match (replay.differs, replay.finite, samples.is_empty()) {
            (true, _, _) => {
                let ranks: Vec<String> = replay.ranks.iter().map(usize::to_string).collect();
                let ranks = ranks.join(", ");
                let reason = format!("two replays of step {step} differ, first on rank {ranks}");
                found(FailureClass::Infrastructure, reason, Vec::new())
            }
            (false, true, _) => {
                let reason = format!("step {step} is finite when it is replayed");
                found(FailureClass::Infrastructure, reason, Vec::new())
            }
            (false, false, true) => {
                let reason = format!("replays of step {step} fail in the same way, bit for bit");
                found(FailureClass::Deterministic, reason, Vec::new())
            }
            (false, false, false) => {
                let reason =
                    format!("replays of step {step} fail in the same way, on these samples");
                found(FailureClass::DataDependent, reason, samples)
            }
        };
    }
    let samples: Vec<String> = sample_of(message).into_iter().collect();
    match repeated(&run.failures, guess) {
        Some((class, reason)) => {
            Classified { class, reason: Some(reason), samples, replayed: false }
        }
        None => Classified { class: guess, reason: None, samples, replayed: false },
    }
}

/// The class of a failure that happened twice, and the reason.
fn repeated(failures: &[FailureRecord], guess: FailureClass) -> Option<(FailureClass, String)> {
    let [.., before, last] = failures else { return None };
    let (one, other) = (last_step(before), last_step(last));
    let same_text = last.tail.last().is_some() && before.tail.last() == last.tail.last();
    match (one.zip(other), before.rank == last.rank) {
        // Killed ranks print nothing; an error names its step.
        (Some((one, other)), true) if one == other && (same_text || last.tail.is_empty()) => {
            Some((
                if guess == FailureClass::DataDependent {
                    guess
                } else {
                    FailureClass::Deterministic
                },
                format!("rank {} failed twice at step {one}", last.rank),
            ))
        }
        (Some((one, other)), true) if one != other && guess == FailureClass::Infrastructure => {
            let rank = last.rank;
            let reason =
                format!("rank {rank} failed twice, at steps {one} and {other}: suspect its host");
            Some((FailureClass::Infrastructure, reason))
        }
        (_, true) if guess == FailureClass::Unknown && same_text => Some((
            FailureClass::Deterministic,
            format!("rank {} failed twice with the same message", last.rank),
        )),
        (_, false) if guess == FailureClass::Unknown => Some((
            FailureClass::Infrastructure,
            format!("different ranks failed: {} and {}", before.rank, last.rank),
        )),
        _ => None,
    }
}

/// The last step in the output of a rank: that of an error, or that of the last report.
fn last_step(failure: &FailureRecord) -> Option<u64> {
    let mut lines = failure.tail.iter().rev();
    lines.find_map(|line| failed_step(line).or_else(|| number_after(line, "step ", "/")))
}

/// The step of an error: `step 12: …`.
fn failed_step(line: &str) -> Option<u64> {
    number_after(line, "step ", ":")
}

/// The number between the texts, e.g. 12 in `step 12: …`.
pub(super) fn number_after(line: &str, before: &str, after: &str) -> Option<u64> {
    line.match_indices(before).find_map(|(at, _)| {
        let rest = &line[at + before.len()..];
        let digits = rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(rest.len());
        rest[digits..].starts_with(after).then(|| rest[..digits].parse().ok()).flatten()
    })
}

/// The sample that an error names: `sample 3 of step 12: …`.
fn sample_of(line: &str) -> Option<String> {
    let sample = number_after(line, "sample ", " of step ")?;
    let step = number_after(line, " of step ", ":")?;
    Some(format!("sample {sample} of step {step}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(rank: usize, lines: &[&str]) -> FailureRecord {
        let tail = lines.iter().map(|line| line.to_string()).collect();
        FailureRecord { rank, tail, ..FailureRecord::default() }
    }

    #[test]
    fn steps_and_samples_are_found() {
        assert_eq!(failed_step("error: step 12: rank 0: layers.3 is not finite"), Some(12));
        assert_eq!(failed_step("step 8/20 | loss 3.1"), None);
        assert_eq!(last_step(&failure(0, &["step 8/20 | loss 3.1", "killed"])), Some(8));
        let line = "step 4: 9 corrupt samples, but data.max_corrupt = 8; for example sample 3 of step 4: x.tokens";
        assert_eq!(sample_of(line).as_deref(), Some("sample 3 of step 4"));
    }

    #[test]
    fn repeated_failures_are_classified() {
        let at = |step: usize| format!("error: step {step}: layers.3 is not finite");
        let cases = [
            ((1, at(7)), (1, at(7)), FailureClass::Unknown, Some(FailureClass::Deterministic)),
            ((1, at(7)), (0, at(9)), FailureClass::Unknown, Some(FailureClass::Infrastructure)),
            (
                (1, at(7)),
                (1, at(9)),
                FailureClass::Infrastructure,
                Some(FailureClass::Infrastructure),
            ),
            ((1, at(7)), (0, at(7)), FailureClass::Deterministic, None),
        ];
        for ((one, text), (other, more), guess, expected) in cases {
            let failures = [failure(one, &[&text]), failure(other, &[&more])];
            let found = repeated(&failures, guess).map(|(class, _)| class);
            assert_eq!(found, expected, "{text} on {one}, {more} on {other}");
        }
        assert!(repeated(&[failure(0, &["x"])], FailureClass::Unknown).is_none());
    }
}
