//! Memory of the stages as stacked bars, compared with the memory of the device.

use std::fmt::Write;

use super::super::{bytes_text, lines};
use crate::MemoryEstimate;
use crate::search::Proposal;

/// Maximum number of stages drawn; the middle of a longer pipeline is left out.
const MOST: usize = 24;
const ROW: usize = 22;
const LEFT: f64 = 70.0;
const WIDE: f64 = 830.0;

pub(super) fn memory(proposal: &Proposal) -> String {
    let stages = &proposal.estimate.stages;
    let left_out = |number: usize| {
        stages.len() > MOST && (MOST / 2..stages.len() - MOST / 2).contains(&number)
    };
    let shown: Vec<usize> = (0..stages.len()).filter(|number| !left_out(*number)).collect();
    let most =
        stages.iter().map(|stage| stage.memory.total().max(stage.available)).fold(1.0, f64::max);
    let height = shown.len() * ROW + 6;
    let mut svg = format!("<svg viewBox=\"0 0 1000 {height}\" role=\"img\" class=\"wide\">");
    for (row, number) in shown.iter().enumerate() {
        let (stage, y) = (&stages[*number], row * ROW + 3);
        let _ = write!(svg, "<text x=\"0\" y=\"{}\">stage {number}</text>", y + 13);
        let mut x = LEFT;
        for (index, (name, bytes)) in lines(&stage.memory).into_iter().enumerate() {
            let width = WIDE * bytes / most;
            let _ = write!(
                svg,
                "<rect class=\"c{index}\" x=\"{x:.1}\" y=\"{y}\" width=\"{width:.1}\" height=\"{}\"><title>stage {number}, {name}: {}</title></rect>",
                ROW - 5,
                bytes_text(bytes)
            );
            x += width;
        }
        let _ = write!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\">{}</text>",
            x + 5.0,
            y + 13,
            bytes_text(stage.memory.total())
        );
        let end = LEFT + WIDE * stage.available / most;
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{end:.1}\" x2=\"{end:.1}\" y1=\"{}\" y2=\"{}\"/>",
            y - 2,
            y + ROW - 3
        );
    }
    svg.push_str("</svg>");
    let used = |index: usize| stages.iter().any(|stage| lines(&stage.memory)[index].1 > 0.0);
    let names =
        lines(&MemoryEstimate::default()).into_iter().enumerate().filter(|(index, _)| used(*index));
    let legend =
        names.map(|(index, (name, _))| format!("<li><i class=\"c{index}\"></i>{name}</li>"));
    let note = match stages.len() - shown.len() {
        0 => String::new(),
        hidden => format!("<p>{hidden} stages in the middle are not shown.</p>"),
    };
    let available = stages.iter().map(|stage| stage.available).fold(f64::INFINITY, f64::min);
    format!(
        "{svg}<ul class=\"legend\">{}<li>┊ device memory: {}</li></ul>{note}",
        legend.collect::<String>(),
        bytes_text(available)
    )
}
