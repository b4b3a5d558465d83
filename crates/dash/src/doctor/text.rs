//! A diagnosis as text.

use std::fmt;

use lockstep_events::MemoryUnit;

use super::evidence::ms;
use super::limits::{Cause, Confidence};
use super::{Advice, Diagnosis, Problem, Scaling};
use crate::RunState;

/// The verdict: one sentence.
pub(super) fn verdict(diagnosis: &Diagnosis) -> String {
    if let Some(problem) = &diagnosis.problem {
        let rank = problem.rank.map_or(String::new(), |rank| format!(" (rank {rank})"));
        return format!(
            "{} at step {} of {}: {}{rank}",
            diagnosis.state.name(),
            diagnosis.step,
            diagnosis.steps,
            problem.kind.name()
        );
    }
    let Some(largest) = diagnosis.limits.first() else {
        return "there is no report to judge yet".into();
    };
    let share = |share: f64| format!("{:.0}%", 100.0 * share);
    let mut text = match largest.cause {
        Cause::Compute | Cause::MemoryBandwidth => {
            let second = diagnosis.limits.iter().find(|limit| {
                !matches!(limit.cause, Cause::Compute | Cause::MemoryBandwidth)
                    && limit.share >= 0.05
            });
            let compute: f64 = diagnosis
                .limits
                .iter()
                .filter(|limit| matches!(limit.cause, Cause::Compute | Cause::MemoryBandwidth))
                .map(|limit| limit.share)
                .sum();
            match second {
                Some(second) => format!(
                    "compute takes {} of the step; next is {} with {}",
                    share(compute),
                    second.cause.name(),
                    share(second.share)
                ),
                None => format!("limited by compute, which takes {} of the step", share(compute)),
            }
        }
        ref cause => format!("limited by {}: {} of the step", cause.name(), share(largest.share)),
    };
    if let Some(first) = diagnosis.advice.first() {
        let gain = first
            .gain
            .map_or(String::new(), |gain| format!(" (predicted {:.0}% faster)", 100.0 * gain));
        let how = if first.sets.is_empty() { first.title.clone() } else { first.options() };
        text.push_str(&format!("; try {how}{gain}"));
    }
    text
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} at step {} of {}", self.run, self.state.name(), self.step, self.steps)?;
        writeln!(f, "verdict: {}", self.verdict)?;
        if let Some(problem) = &self.problem {
            write_problem(f, problem)?;
        }
        if let Some(measured) = &self.measured {
            writeln!(f, "\nwhat limits the step ({} on average):", ms(measured.step))?;
        }
        for limit in &self.limits {
            let confidence = match limit.confidence {
                Confidence::High => "high",
                Confidence::Medium => "medium",
                Confidence::Low => "low",
            };
            let name = limit.cause.name();
            writeln!(f, "  {:>5.1}%  {name} (confidence: {confidence})", 100.0 * limit.share)?;
            limit.evidence.iter().try_for_each(|line| writeln!(f, "          {line}"))?;
        }
        if let Some(Scaling { run, ranks, efficiency }) = &self.scaling {
            writeln!(
                f,
                "scaling efficiency: {:.0}% of the throughput per core of {run} on {ranks} rank(s)",
                100.0 * efficiency
            )?;
        }
        if !self.limits.is_empty() {
            self.write_advice(f)?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "\nnote: {note}"))
    }
}

impl Diagnosis {
    fn write_advice(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.advice.is_empty() {
            let running = matches!(self.state, RunState::Failed | RunState::Stuck);
            if !running {
                writeln!(
                    f,
                    "\nwhat to do next: nothing is predicted to make the step clearly faster"
                )?;
            }
        } else {
            writeln!(f, "\nwhat to do next:")?;
        }
        for (number, Advice { title, sets, gain, why, changes_training }) in
            self.advice.iter().enumerate()
        {
            let gain = gain.map_or(String::new(), |gain| format!(": {:.0}% faster", 100.0 * gain));
            writeln!(f, "  {}. {title}{gain}", number + 1)?;
            if !sets.is_empty() {
                writeln!(f, "       {}", self.advice[number].options())?;
            }
            let warning =
                if *changes_training { "; changes the result of the training" } else { "" };
            writeln!(f, "       {why}{warning}")?;
        }
        if !self.rejected.is_empty() {
            writeln!(f, "\nconsidered and not recommended:")?;
        }
        for rejected in &self.rejected {
            writeln!(f, "  {}: {}", rejected.sets.join(" "), rejected.why)?;
        }
        Ok(())
    }
}

fn write_problem(f: &mut fmt::Formatter<'_>, problem: &Problem) -> fmt::Result {
    let bytes = |bytes: u64| {
        let unit = MemoryUnit::of(bytes);
        format!("{} {unit}", unit.number(bytes))
    };
    writeln!(f, "\nwhat went wrong: {} ({})", problem.kind.name(), problem.class.name())?;
    problem.reason.iter().try_for_each(|reason| writeln!(f, "  {reason}"))?;
    problem.samples.iter().try_for_each(|sample| writeln!(f, "  caused by {sample}"))?;
    if let Some(rank) = problem.rank {
        let exit = problem.exit.as_deref().map_or(String::new(), |exit| format!(", which {exit}"));
        writeln!(f, "  first failing rank: {rank}{exit}")?;
    }
    if !problem.message.is_empty() {
        writeln!(f, "  {}", problem.message)?;
    }
    if let Some(operation) = &problem.operation {
        writeln!(f, "  operation: {operation}")?;
    }
    if !problem.waited.is_empty() {
        let ranks: Vec<String> = problem.waited.iter().map(usize::to_string).collect();
        writeln!(f, "  ranks that waited: {}", ranks.join(", "))?;
    }
    if problem.failures > 1 {
        writeln!(f, "  failures so far: {}", problem.failures)?;
    }
    writeln!(f, "  what to do: {}", problem.action)?;
    for (line, planned) in &problem.ledger {
        writeln!(f, "  {line:>12} {:>12} planned per rank", bytes(*planned))?;
    }
    for fix in &problem.fixes {
        writeln!(
            f,
            "  --set {}: {} less per rank, step time {:+.0}%",
            fix.set,
            bytes(fix.saved),
            100.0 * fix.slower
        )?;
    }
    if !problem.log.is_empty() {
        writeln!(f, "  end of its log:")?;
    }
    problem.log.iter().try_for_each(|line| writeln!(f, "  | {line}"))
}
