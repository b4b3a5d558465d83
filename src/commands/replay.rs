//! `lockstep train --replay-step`: repeats one step and reports whether the data or a machine caused its failure.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::bail;
use lockstep_comm::World;
use lockstep_dash::{REPLAYS, ReplayRecord};
use lockstep_data::Source;
use lockstep_plan::Plan;
use lockstep_trainer::{
    Divergence, Outcome, Replayed, Run, Start, failed_dir, replay, train_sample,
};

use crate::commands::device;
use crate::print::print_line;

/// Characters shown of each sample.
const MAX_TEXT: usize = 160;

/// The step to replay, of the run in `folder`.
pub struct ReplayRequest<'a> {
    pub plan: &'a Plan,
    pub source: &'a Source,
    pub folder: &'a Path,
    /// Checkpoint that the run started from. Default: random weights.
    pub from: Option<Start>,
    pub step: u64,
}

/// Replays the step. All ranks call this.
pub fn run(request: ReplayRequest<'_>, world: &World) -> anyhow::Result<()> {
    let ReplayRequest { plan, source, folder, from, step } = request;
    if step == 0 || step > plan.train.steps as u64 {
        bail!("--replay-step {step} is out of range: the run has steps 1 to {}", plan.train.steps);
    }
    let first = world.rank() == 0;
    let start = state_before(folder, step)?.or(from);
    if first {
        let origin = match &start {
            Some(start) => start.checkpoint.display().to_string(),
            None => "its initial weights".to_string(),
        };
        print_line!("{}: replaying step {step} from {origin}", plan.name);
    }
    let from_failure =
        start.as_ref().is_some_and(|start| start.checkpoint.starts_with(failed_dir(folder)));
    let device = device::open(plan, world)?;
    let run = Run {
        plan,
        device,
        group: world,
        source,
        folder,
        start,
        generation: None,
        stop: &|| false,
    };
    let replayed = replay(&run, step, |at| {
        if first && at < step && at.is_multiple_of(plan.train.log_every.max(1) as u64) {
            print_line!("repeating step {at}");
        }
    })?;
    if first {
        let recorded = recorded(folder, step);
        print_line!("{}", verdict(step, &replayed, from_failure, recorded));
        record(folder, step, &replayed);
        for sample in &replayed.samples {
            print_line!("{}", describe_sample(plan, source, step, *sample));
        }
    }
    // A rank that exits before the others would look like a failure to them.
    world.barrier()?;
    Ok(())
}

/// Appends the verdict to the logs of the run, where `lockstep doctor` finds it. A folder that cannot be written must not
/// hide the verdict.
fn record(folder: &Path, step: u64, replayed: &Replayed) {
    let Replayed { outcome, divergence, samples } = replayed;
    let record = ReplayRecord {
        step,
        differs: divergence.is_some(),
        ranks: divergence.as_ref().map_or(Vec::new(), |divergence| divergence.ranks.clone()),
        finite: matches!(outcome, Outcome::Finite(_)),
        samples: samples.clone(),
    };
    let path = folder.join("logs").join(REPLAYS);
    let file = OpenOptions::new().create(true).append(true).open(path);
    let line = serde_json::to_string(&record).expect("a record is plain data");
    let _ = file.and_then(|mut file| writeln!(file, "{line}"));
}

/// The state saved when the step failed, or else the newest checkpoint before the step.
fn state_before(folder: &Path, step: u64) -> anyhow::Result<Option<Start>> {
    let failed = lockstep_ckpt::before(&failed_dir(folder), step)?;
    let failed = failed.filter(|(done, _)| *done + 1 == step);
    let found = match failed {
        Some(failed) => Some(failed),
        None => lockstep_ckpt::before(folder, step)?,
    };
    Ok(found.map(|(_, checkpoint)| Start { checkpoint, resume: true }))
}

/// The step's loss in metrics.jsonl.
fn recorded(folder: &Path, step: u64) -> Option<f64> {
    let reports = lockstep_events::read(&folder.join("metrics.jsonl")).ok()?;
    reports.iter().rev().find(|report| report.step as u64 == step && report.loss.is_some())?.loss
}

fn verdict(step: u64, replayed: &Replayed, from_failure: bool, recorded: Option<f64>) -> String {
    let Replayed { outcome, divergence, samples } = replayed;
    if let Some(Divergence { ranks, place }) = divergence {
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let who = match &ranks[..] {
            [one] => format!("rank {one}"),
            several => format!("ranks {}", several.join(" and ")),
        };
        return format!(
            "step {step} differs between the two replays, first on {who}, in {place}: the machine computes incorrect \
             results. Remove it and continue with --resume"
        );
    }
    match outcome {
        Outcome::NotFinite { rank, place } => {
            let what = match samples.len() {
                0 => "the loss of every sample is finite, so the error is in the backward pass"
                    .to_string(),
                count => format!("the loss of {count} of its samples is not finite"),
            };
            format!(
                "step {step} is not finite in both replays, bit for bit the same: the cause is the data or the \
                 arithmetic, not a machine. It starts on rank {rank}, in {place}; {what}. Use a lower lr, a longer \
                 warmup or a smaller clip"
            )
        }
        Outcome::Finite(stepped) => {
            let figures = format!(
                "step {step} is finite in both replays, bit for bit the same: loss {:.6}, grad norm {:.4}",
                stepped.loss, stepped.grad_norm
            );
            let conclusion = match (from_failure, recorded) {
                (true, _) => {
                    "; neither the data nor the arithmetic caused the failure: check the memory and the processor of \
                     the rank that it named, and continue with --resume"
                        .to_string()
                }
                (false, Some(loss)) if loss == stepped.loss => "; the same as in the run".to_string(),
                (false, Some(loss)) => format!(
                    "; the loss of the run was {loss:.6}. If layout, processors and program are the same, a machine \
                     computed an incorrect result, then or now"
                ),
                (false, None) => String::new(),
            };
            figures + &conclusion
        }
    }
}

/// Origin and beginning of a sample.
fn describe_sample(plan: &Plan, source: &Source, step: u64, index: usize) -> String {
    let (id, seq) = (train_sample(plan, step, index), plan.data.seq);
    let mut tokens = vec![0; seq + 1];
    source.sample(id, &mut tokens);
    let pieces: Vec<String> = source
        .pieces(id, seq)
        .iter()
        .map(|piece| {
            let (path, tokens) = (piece.path.display(), &piece.tokens);
            format!(
                "{path}, document {}, tokens {} to {}",
                piece.document, tokens.start, tokens.end
            )
        })
        .collect();
    let from = match pieces.is_empty() {
        true => "generated by the built-in grammar".to_string(),
        false => pieces.join("; "),
    };
    // Tokens that cannot be decoded are shown as an empty text.
    let text: String = source.decode(&tokens).unwrap_or_default().chars().take(MAX_TEXT).collect();
    format!("  sample {index}: {from}\n    {text:?}")
}

/// The shell command that replays a step of the run started with `run_args`.
pub fn command(run_args: &[String], step: u64) -> String {
    let replay = ["--replay-step".to_string(), step.to_string()];
    let program = ["lockstep".to_string(), "train".to_string()];
    let all = program.iter().chain(run_args).chain(&replay);
    all.map(|word| shell_quote(word)).collect::<Vec<_>>().join(" ")
}

fn shell_quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_string(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_trainer::StepResult;
    use std::time::Duration;

    #[test]
    fn verdicts() {
        let none = Duration::ZERO;
        let stepped = StepResult {
            loss: 2.5,
            auxiliary: 0.0,
            experts: None,
            grad_norm: 1.0,
            lr: 1e-3,
            time: none,
            exposed_comm: none,
            exposed_by_axis: Default::default(),
            reading: none,
            sent: 0,
        };
        let finite = || Outcome::Finite(stepped);
        let bad = || Outcome::NotFinite { rank: 1, place: "layers.1 (its output)".into() };
        let divergence = |ranks: &[usize]| {
            Some(Divergence { ranks: ranks.to_vec(), place: "head (its gradient)".into() })
        };
        for (outcome, divergence, samples, from_failure, recorded, expected) in [
            (
                finite(),
                None,
                vec![],
                false,
                None,
                "bit for bit the same: loss 2.500000, grad norm 1.0000",
            ),
            (finite(), None, vec![], false, Some(2.5), "the same as in the run"),
            (finite(), None, vec![], false, Some(2.6), "the loss of the run was 2.600000"),
            (finite(), None, vec![], true, None, "check the memory and the processor"),
            (
                bad(),
                None,
                vec![3, 4],
                true,
                None,
                "not a machine. It starts on rank 1, in layers.1",
            ),
            (bad(), None, vec![3, 4], true, None, "the loss of 2 of its samples is not finite"),
            (bad(), None, vec![], true, None, "in the backward pass"),
            (
                bad(),
                divergence(&[2]),
                vec![3],
                true,
                None,
                "first on rank 2, in head (its gradient)",
            ),
            (finite(), divergence(&[2, 3]), vec![], true, None, "first on ranks 2 and 3, in head"),
        ] {
            let replayed = Replayed { outcome, divergence, samples };
            let message = verdict(7, &replayed, from_failure, recorded);
            assert!(message.contains(expected), "no {expected:?} in: {message}");
        }
    }
}
