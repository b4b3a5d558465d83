//! Pipeline timeline: one row per stage, one box per pass.

use std::fmt::Write;

use lockstep_plan::schedule::Act;

use super::super::{time_text, timeline};
use crate::search::Proposal;

/// Maximum rows and micro-batches that remain readable.
const MOST_ROWS: usize = 32;
const MOST_MICROS: usize = 16;
const ROW: usize = 20;
const LEFT: f64 = 70.0;
const WIDE: f64 = 925.0;

pub(super) fn pipeline(proposal: &Proposal) -> String {
    let plan = &proposal.plan;
    if plan.layout.pipe == 1 {
        return "<p>One stage: no pipeline bubble.</p>".into();
    }
    let Some(timeline) = timeline(proposal, MOST_MICROS) else { return String::new() };
    let (makespan, rows) = (timeline.makespan(), timeline.ranks.len().min(MOST_ROWS));
    let mut svg =
        format!("<svg viewBox=\"0 0 1000 {}\" role=\"img\" class=\"wide\">", rows * ROW + 4);
    for (rank, spans) in timeline.ranks.iter().take(rows).enumerate() {
        let y = rank * ROW + 2;
        let _ = write!(svg, "<text x=\"0\" y=\"{}\">stage {rank}</text>", y + 13);
        for span in spans {
            let (x, width) =
                (LEFT + WIDE * span.start / makespan, WIDE * (span.end - span.start) / makespan);
            let class = match span.action.act {
                Act::Forward => "f",
                Act::Weights => "w",
                Act::Input | Act::Backward => "b",
            };
            let _ = write!(
                svg,
                "<rect class=\"{class} cell\" x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{}\"><title>{} {}</title></rect>",
                ROW - 4,
                span.action,
                time_text(span.end - span.start)
            );
        }
    }
    svg.push_str("</svg>");
    let micros = timeline.ranks[0].iter().map(|span| span.action.micro + 1).max().unwrap_or(0);
    let mut note = format!("{}, ", plan.layout.schedule);
    note += &match micros < plan.train.accumulation {
        true => format!("drawn with {micros} instead of {} micro-batches", plan.train.accumulation),
        false => format!("{micros} micro-batches"),
    };
    if timeline.ranks.len() > rows {
        let _ = write!(note, "; the first {rows} of {} stages", timeline.ranks.len());
    }
    let split = if plan.layout.schedule.splits() {
        "<li><i class=\"c6\"></i>weight gradient</li>"
    } else {
        ""
    };
    format!(
        "{svg}<ul class=\"legend\"><li><i class=\"c0\"></i>forward</li><li><i class=\"c5\"></i>backward</li>{split}</ul><p>{note}.</p>"
    )
}
