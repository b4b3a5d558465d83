//! `lockstep train --replay-step`: one step of a run once more, and what follows from how it comes out.

use std::path::Path;

use anyhow::bail;
use lockstep_comm::World;
use lockstep_data::{SampleId, Source, Split};
use lockstep_kernels::Device;
use lockstep_plan::Plan;
use lockstep_trainer::{Divergence, Outcome, Replayed, Run, Start, failed_dir, replay};

use crate::print::print_line;

/// Texts of samples are shown this far.
const SHOWN: usize = 160;

/// Replays a step of the run in `folder` on the ranks of a world. `from` is where the run began, if not at random.
pub fn rank(
    plan: &Plan,
    source: &Source,
    folder: &Path,
    from: Option<Start>,
    step: u64,
    world: &World,
) -> anyhow::Result<()> {
    if step == 0 || step > plan.train.steps as u64 {
        bail!("--replay-step {step}: the run has steps 1 to {}", plan.train.steps);
    }
    let first = world.rank() == 0;
    let start = before(folder, step)?.or(from);
    if first {
        let whence = match &start {
            Some(start) => start.checkpoint.display().to_string(),
            None => "its beginning".to_string(),
        };
        print_line!("{}: step {step} once more, from {whence}", plan.name);
    }
    let kept = start.as_ref().is_some_and(|start| start.checkpoint.starts_with(failed_dir(folder)));
    let device = Device::cpu(plan.train.threads);
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
            print_line!("on the way: step {at}");
        }
    })?;
    if first {
        let recorded = recorded(folder, step);
        print_line!("{}", verdict(step, &replayed, kept, recorded));
        for sample in &replayed.samples {
            print_line!("{}", origin(plan, source, step, *sample));
        }
    }
    // Ranks leave together: nobody takes the end of another for a failure.
    world.barrier()?;
    Ok(())
}

/// The state closest before a step: what a failure left, or the newest checkpoint that is older.
fn before(folder: &Path, step: u64) -> anyhow::Result<Option<Start>> {
    let kept = lockstep_ckpt::before(&failed_dir(folder), step)?;
    let kept = kept.filter(|(done, _)| *done + 1 == step);
    let found = match kept {
        Some(kept) => Some(kept),
        None => lockstep_ckpt::before(folder, step)?,
    };
    Ok(found.map(|(_, checkpoint)| Start { checkpoint, resume: true }))
}

/// The loss that the run wrote down.
fn recorded(folder: &Path, step: u64) -> Option<f64> {
    let reports = lockstep_events::read(&folder.join("metrics.jsonl")).ok()?;
    reports.iter().rev().find(|report| report.step as u64 == step && report.loss.is_some())?.loss
}

fn verdict(step: u64, replayed: &Replayed, kept: bool, recorded: Option<f64>) -> String {
    let Replayed { outcome, divergence, samples } = replayed;
    if let Some(Divergence { ranks, place }) = divergence {
        let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
        let who = match &ranks[..] {
            [one] => format!("rank {one}"),
            several => format!("ranks {}", several.join(" and ")),
        };
        return format!(
            "step {step} came out differently the second time, first on {who}, in {place}: a machine computes \
             wrongly there. Take it out of service, and go on with --resume"
        );
    }
    match outcome {
        Outcome::NotFinite { rank, place } => {
            let what = match samples.len() {
                0 => "every sample's loss is finite, so it arises on the way back".to_string(),
                count => format!("the loss of {count} of its samples is not finite"),
            };
            format!(
                "step {step} is not finite again, with the same bits twice: it lies in the data or in the arithmetic, \
                 not in a machine. It begins on rank {rank}, in {place}; {what}. Try a lower lr, a longer warmup, \
                 or a smaller clip"
            )
        }
        Outcome::Finite(stepped) => {
            let figures = format!(
                "step {step} is finite, with the same bits twice: loss {:.6}, grad norm {:.4}",
                stepped.loss, stepped.grad_norm
            );
            let after = match (kept, recorded) {
                (true, _) => {
                    "; what ended the run came neither from its data nor from its arithmetic: suspect the memory or \
                     the processor of the rank that it named, and go on with --resume"
                        .to_string()
                }
                (false, Some(loss)) if loss == stepped.loss => "; as the run wrote it down".to_string(),
                (false, Some(loss)) => format!(
                    "; the run wrote down a loss of {loss:.6}. On the same layout, processors and program that means a \
                     machine computed wrongly, then or now"
                ),
                (false, None) => String::new(),
            };
            figures + &after
        }
    }
}

/// Where a sample comes from, and how it begins.
fn origin(plan: &Plan, source: &Source, step: u64, index: usize) -> String {
    let (seed, global, seq) = (plan.train.seed, plan.train.global_batch, plan.data.seq);
    let mut tokens = vec![0; seq + 1];
    source.sample(
        SampleId { split: Split::Train, seed, step, global_batch: global, index },
        &mut tokens,
    );
    let pieces: Vec<String> = source
        .pieces(SampleId { split: Split::Train, seed, step, global_batch: global, index }, seq)
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
        true => "made by the built-in grammar".to_string(),
        false => pieces.join("; "),
    };
    // What cannot be decoded is told by its place alone.
    let text: String = source.decode(&tokens).unwrap_or_default().chars().take(SHOWN).collect();
    format!("  sample {index}: {from}\n    {text:?}")
}

/// What to type to see a step of a training once more; `typed` is what it was started with.
pub fn command(typed: &[String], step: u64) -> String {
    let last = ["--replay-step".to_string(), step.to_string()];
    let words = ["lockstep".to_string(), "train".to_string()];
    let all = words.iter().chain(typed).chain(&last);
    all.map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
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
    fn what_is_said_of_it() {
        let none = Duration::ZERO;
        let stepped = StepResult {
            loss: 2.5,
            auxiliary: 0.0,
            grad_norm: 1.0,
            lr: 1e-3,
            time: none,
            exposed_comm: none,
            reading: none,
            sent: 0,
        };
        let finite = || Outcome::Finite(stepped);
        let bad = || Outcome::NotFinite { rank: 1, place: "layers.1 (its output)".into() };
        let divergence = |ranks: &[usize]| {
            Some(Divergence { ranks: ranks.to_vec(), place: "head (its gradient)".into() })
        };
        for (outcome, divergence, samples, kept, recorded, said) in [
            (
                finite(),
                None,
                vec![],
                false,
                None,
                "same bits twice: loss 2.500000, grad norm 1.0000",
            ),
            (finite(), None, vec![], false, Some(2.5), "as the run wrote it down"),
            (finite(), None, vec![], false, Some(2.6), "the run wrote down a loss of 2.600000"),
            (finite(), None, vec![], true, None, "suspect the memory or the processor"),
            (
                bad(),
                None,
                vec![3, 4],
                true,
                None,
                "not in a machine. It begins on rank 1, in layers.1",
            ),
            (bad(), None, vec![3, 4], true, None, "the loss of 2 of its samples is not finite"),
            (bad(), None, vec![], true, None, "on the way back"),
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
            let told = verdict(7, &Replayed { outcome, divergence, samples }, kept, recorded);
            assert!(told.contains(said), "no {said:?} in: {told}");
        }
    }
}
