//! Tables of aligned columns, no wider than a terminal.

use std::fmt::Write;

use super::{bytes_text, group_name, headline, lines, phase_name, time_text, timeline};
use crate::advice::LadderStep;
use crate::cluster::GIB;
use crate::search::{Proposal, Reason, layout_words, parts};
use crate::{Cluster, Flow, MemoryEstimate};

/// Columns that are not exceeded.
const WIDTH: usize = 118;

/// A plan on a cluster: memory by stage, traffic by axis and link, the step in time, and whether it fits.
pub fn text(proposal: &Proposal, cluster: &Cluster) -> String {
    let (plan, estimate) = (&proposal.plan, &proposal.estimate);
    let mut out = String::new();
    let mut say = |line: &str| {
        out.push_str(line);
        out.push('\n');
    };
    say(&format!("{}: {}", plan.name, headline(plan)));
    say(&format!("{} × {} ({})", plan.ranks, cluster.accelerator.name, cluster.name));
    say(&format!(
        "{}, micro_batch={} × {}",
        layout_words(plan),
        plan.train.micro_batch,
        plan.train.accumulation
    ));
    say("");
    say(&memory_table(proposal));
    say(&traffic_table(proposal, cluster));
    say(&step_bars(proposal));
    say(&pipeline_text(proposal));
    say(&format!(
        "step {}, {:.0} tokens/s, mfu {:.1}% (causal {:.1}%), hardware {:.1}%",
        time_text(estimate.step_s),
        estimate.tokens_per_s,
        100.0 * estimate.mfu,
        100.0 * estimate.mfu_causal,
        100.0 * estimate.hfu
    ));
    let over = proposal.over();
    out.push_str(&match estimate.fits {
        true => format!("fits: {} left on the fullest rank\n", bytes_text(-over)),
        false => format!("does not fit: {} too many on the fullest rank\n", bytes_text(over)),
    });
    out
}

/// A row per stage; many alike are left out.
fn memory_table(proposal: &Proposal) -> String {
    let stages = &proposal.estimate.stages;
    let shown = lines(&MemoryEstimate::default()).map(|(name, _)| name);
    let used = |index: usize| stages.iter().any(|stage| lines(&stage.memory)[index].1 > 0.0);
    let columns: Vec<usize> = (0..shown.len()).filter(|index| used(*index)).collect();
    let mut table = String::from("memory per rank, GiB\n  stage");
    for index in &columns {
        let _ = write!(table, " {:>8}", shorter(shown[*index]));
    }
    let _ = writeln!(table, " {:>8} {:>6}", "total", "of");
    for (number, stage) in stages.iter().enumerate() {
        if stages.len() > 12 && (4..stages.len() - 4).contains(&number) {
            if number == 4 {
                table.push_str("  …\n");
            }
            continue;
        }
        let _ = write!(table, "  {number:>5}");
        for index in &columns {
            let _ = write!(
                table,
                " {:>8.*}",
                digits(stage.available),
                lines(&stage.memory)[*index].1 / GIB
            );
        }
        let (total, available) = (stage.memory.total() / GIB, stage.available / GIB);
        let much = if total > available { "  too much" } else { "" };
        let _ = writeln!(table, " {total:>8.*} {available:>6.1}{much}", digits(stage.available));
    }
    table
}

/// Small devices are told more finely.
fn digits(available: f64) -> usize {
    if available < 32.0 * GIB { 3 } else { 2 }
}

fn shorter(name: &str) -> &str {
    match name {
        "parameters" => "params",
        "gradients" => "grads",
        "optimizer" => "optim.",
        "activations" => "activat.",
        name => name,
    }
}

fn traffic_table(proposal: &Proposal, cluster: &Cluster) -> String {
    let flows: Vec<&Flow> =
        proposal.estimate.flows.iter().filter(|flow| flow.bytes > 0.0).collect();
    if flows.is_empty() {
        return "traffic: none\n".into();
    }
    let mut table = format!(
        "traffic of a rank in a step\n  {:<13} {:>5} {:<15} {:<14} {:<9} {:>8} {:>11} {:>11} {:>11}\n",
        "axis", "ranks", "link", "collective", "phase", "times", "each", "sent", "takes"
    );
    for flow in flows {
        let _ = writeln!(
            table,
            "  {:<13} {:>5} {:<15} {:<14} {:<9} {:>8.0} {:>11} {:>11} {:>11}",
            group_name(flow.kind),
            flow.members,
            cluster.links[flow.link].name,
            flow.collective.name(),
            phase_name(flow.phase),
            flow.times,
            bytes_text(flow.bytes),
            bytes_text(flow.sent()),
            time_text(flow.total())
        );
    }
    table
}

/// Where the time of the slowest rank goes.
fn step_bars(proposal: &Proposal) -> String {
    let step = proposal.estimate.step_s;
    let mut bars = String::from("where the step goes\n");
    for (name, seconds) in parts(&proposal.estimate) {
        let share = seconds / step;
        if share >= 5e-4 {
            let bar = "█".repeat((50.0 * share).round() as usize);
            let _ = writeln!(
                bars,
                "  {name:<25} {:>11} {:>5.1}% {bar}",
                time_text(seconds),
                100.0 * share
            );
        }
    }
    bars
}

/// The first micro-batches through the pipeline, where there is one that fits on a page.
fn pipeline_text(proposal: &Proposal) -> String {
    let layout = &proposal.plan.layout;
    if layout.pipe == 1 || layout.pipe > 16 {
        return String::new();
    }
    let whole = proposal.plan.train.accumulation;
    let Some(timeline) = timeline(proposal, layout.pipe.max(4)) else { return String::new() };
    let shortest = timeline
        .ranks
        .iter()
        .flatten()
        .map(|span| span.end - span.start)
        .fold(f64::INFINITY, f64::min);
    let mut title = String::from("the pipeline in time");
    let micros = timeline.ranks[0].iter().map(|span| span.action.micro + 1).max().unwrap_or(0);
    if micros < whole {
        let _ = write!(title, ", as if a step had {micros} of its {whole} micro-batches");
    }
    // As fine as the width allows, but never so that an action has no cell.
    let mut unit = shortest.max(timeline.makespan() / 40.0);
    let mut drawn = timeline.draw(unit);
    while drawn.lines().any(|line| line.chars().count() > WIDTH) && unit < timeline.makespan() {
        unit *= 1.2;
        drawn = timeline.draw(unit);
    }
    format!("{title}\n{drawn}")
}

/// Proposals as a table, the best first.
pub fn proposals_text(proposals: &[Proposal]) -> String {
    let mut table =
        format!("  {:>10} {:>6} {:>9} {:>6}  layout\n", "step", "mfu", "memory", "micro");
    for proposal in proposals {
        let _ = writeln!(
            table,
            "  {:>10} {:>5.1}% {:>9} {:>6}  {}{}",
            time_text(proposal.estimate.step_s),
            100.0 * proposal.estimate.mfu,
            bytes_text(proposal.bytes()),
            proposal.plan.train.micro_batch,
            layout_words(&proposal.plan),
            if proposal.estimate.fits { "" } else { " (does not fit)" }
        );
    }
    table
}

/// Why each knob stands as it does.
pub fn reasons_text(reasons: &[Reason]) -> String {
    let mut text = String::new();
    for reason in reasons {
        let _ = writeln!(text, "  {}", reason.typed);
        for turn in &reason.turns {
            let by = turn
                .times
                .map_or("  –".to_string(), |times| format!("{:+.1}%", 100.0 * (times - 1.0)));
            let _ = writeln!(text, "    {:<22} {by:>8}  {}", turn.typed, turn.why);
        }
    }
    text
}

/// The ladder, rung by rung.
pub fn ladder_text(rungs: &[LadderStep]) -> String {
    let mut text = String::new();
    for rung in rungs {
        let mark = if rung.taken { "✓" } else { "·" };
        let step = rung
            .proposal
            .as_ref()
            .map_or("–".into(), |proposal| time_text(proposal.estimate.step_s));
        let _ = writeln!(text, "  {mark} {:<17} {step:>10}  {}", rung.means, rung.why);
        if let Some(proposal) = rung.proposal.as_ref().filter(|_| rung.taken) {
            let micro_batch = proposal.plan.train.micro_batch;
            let _ = writeln!(
                text,
                "    {:<17} {:>10}  {}, micro_batch={micro_batch}",
                "",
                "",
                layout_words(&proposal.plan)
            );
        }
    }
    text
}
