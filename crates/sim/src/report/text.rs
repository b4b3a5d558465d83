//! Text tables for a terminal.

use std::fmt::Write;

use super::{bytes_text, group_name, headline, lines, phase_name, time_text, timeline};
use crate::advice::LadderStep;
use crate::cluster::GIB;
use crate::search::{Proposal, Reason, layout_words, time_breakdown};
use crate::{Cluster, Flow, MemoryEstimate};

/// Maximum width in columns.
const WIDTH: usize = 118;

/// Memory per stage, traffic per axis and link, time breakdown, and whether the plan fits.
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
    let host = estimate.stages.iter().map(|stage| stage.memory.host).fold(0.0, f64::max);
    if host > 0.0 {
        say(&format!("offloaded to host memory: {} per rank\n", bytes_text(host)));
    }
    say(&traffic_table(proposal, cluster));
    say(&step_bars(proposal));
    say(&pipeline_text(proposal));
    say(&format!(
        "step {}, {:.0} tokens/s, MFU {:.1}% (causal {:.1}%), HFU {:.1}%",
        time_text(estimate.step_s),
        estimate.tokens_per_s,
        100.0 * estimate.mfu,
        100.0 * estimate.mfu_causal,
        100.0 * estimate.hfu
    ));
    let over = proposal.over();
    out.push_str(&match estimate.fits {
        true => format!("fits: {} left on the fullest rank\n", bytes_text(-over)),
        false => {
            format!("does not fit: the fullest rank exceeds its memory by {}\n", bytes_text(over))
        }
    });
    out
}

/// One row per stage; the middle of a long pipeline is left out.
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
        let much = if total > available { "  exceeds" } else { "" };
        let _ = writeln!(table, " {total:>8.*} {available:>6.1}{much}", digits(stage.available));
    }
    table
}

/// Small devices get more decimals.
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
        "traffic per rank and step\n  {:<13} {:>5} {:<15} {:<14} {:<9} {:>8} {:>11} {:>11} {:>11}\n",
        "group", "ranks", "link", "collective", "phase", "calls", "size", "sent", "time"
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

/// Time breakdown of the busiest rank.
fn step_bars(proposal: &Proposal) -> String {
    let step = proposal.estimate.step_s;
    let mut bars = String::from("time breakdown of the busiest rank\n");
    for (name, seconds) in time_breakdown(&proposal.estimate) {
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

/// The first micro-batches of the pipeline, if it has at most 16 ranks.
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
    let micros = timeline.ranks[0].iter().map(|span| span.action.micro + 1).max().unwrap_or(0);
    let mut notes = Vec::new();
    if micros < whole {
        notes.push(format!("with {micros} instead of {whole} micro-batches"));
    }
    // As fine as the width allows. A row that is still too long is cut, so that it shows every pass up to there.
    let mut unit = shortest.max(timeline.makespan() / 40.0);
    let mut drawn = timeline.draw(unit);
    let too_wide = |drawn: &str| drawn.lines().any(|line| line.chars().count() > WIDTH);
    while too_wide(&drawn) && unit < timeline.makespan() {
        unit *= 1.2;
        drawn = timeline.draw(unit);
    }
    if too_wide(&drawn) {
        notes.push("its beginning; the HTML report has all of it".into());
        drawn = drawn.lines().map(cut).collect();
    }
    match notes.is_empty() {
        true => format!("pipeline timeline\n{drawn}"),
        false => format!("pipeline timeline ({})\n{drawn}", notes.join("; ")),
    }
}

/// A row of the timeline, cut to the width before a pass that does not fit.
fn cut(row: &str) -> String {
    if row.chars().count() <= WIDTH {
        return format!("{row}\n");
    }
    let start: String = row.chars().take(WIDTH - 1).collect();
    let end = start.rfind([' ', '.']).map_or(0, |at| at + 1);
    format!("{}…\n", &start[..end])
}

/// Table of proposals, best first.
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

/// Alternatives of each knob.
pub fn reasons_text(reasons: &[Reason]) -> String {
    let mut text = String::new();
    for reason in reasons {
        let _ = writeln!(text, "  {}", reason.setting);
        for other in &reason.alternatives {
            let change = other
                .ratio
                .map_or("  –".to_string(), |ratio| format!("{:+.1}%", 100.0 * (ratio - 1.0)));
            let _ = writeln!(text, "    {:<22} {change:>8}  {}", other.setting, other.why);
        }
    }
    text
}

/// Step-by-step advice.
pub fn ladder_text(steps: &[LadderStep]) -> String {
    let mut text = String::new();
    for step in steps {
        let mark = if step.taken { "✓" } else { "·" };
        let seconds = step
            .proposal
            .as_ref()
            .map_or("–".into(), |proposal| time_text(proposal.estimate.step_s));
        let _ = writeln!(text, "  {mark} {:<17} {seconds:>10}  {}", step.technique, step.why);
        if let Some(proposal) = step.proposal.as_ref().filter(|_| step.taken) {
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
