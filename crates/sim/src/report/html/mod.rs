//! The plan as a self-contained HTML page, without scripts, fonts or links. Follows the reader's light or dark theme.

mod bars;
mod cells;
mod pipeline;

use std::fmt::Write;

use super::{bytes_text, group_name, headline, phase_name, time_text};
use crate::search::{Proposal, bottlenecks, layout_words, time_breakdown};
use crate::{Cluster, Flow};

const STYLE: &str = include_str!("style.css");

/// The page: summary, memory bars, pipeline timeline, communication matrix, rank map. `notes` are additional text
/// sections.
pub fn html(proposal: &Proposal, cluster: &Cluster, notes: &[(&str, String)]) -> String {
    let plan = &proposal.plan;
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{0}: plan</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n<p>{1}</p>\n<p><code>{2}</code></p>\n",
        escape(&plan.name),
        escape(&headline(plan)),
        escape(&layout_words(plan)),
    );
    page.push_str(&figures(proposal, cluster));
    section(&mut page, "Memory by stage", &bars::memory(proposal));
    section(&mut page, "Time breakdown", &step(proposal, cluster));
    section(&mut page, "Pipeline timeline", &pipeline::pipeline(proposal));
    section(&mut page, "Traffic per rank and step", &traffic(proposal, cluster));
    section(&mut page, "Communication matrix", &cells::matrix(proposal));
    section(&mut page, "Rank map", &cells::rank_map(proposal, cluster));
    for (title, text) in notes {
        section(&mut page, title, &format!("<pre>{}</pre>", escape(text)));
    }
    page.push_str("</body></html>\n");
    page
}

fn section(page: &mut String, title: &str, body: &str) {
    if !body.is_empty() {
        let _ = write!(page, "<section><h2>{title}</h2>\n{body}</section>\n");
    }
}

/// The key figures.
fn figures(proposal: &Proposal, cluster: &Cluster) -> String {
    let (plan, estimate) = (&proposal.plan, &proposal.estimate);
    let over = proposal.over();
    let room = if estimate.fits {
        format!("{} left", bytes_text(-over))
    } else {
        format!("{} over", bytes_text(over))
    };
    let class = if estimate.fits { "good" } else { "bad" };
    let tile = |name: &str, value: &str, class: &str| {
        format!("<div class=\"tile {class}\"><b>{}</b><span>{name}</span></div>", escape(value))
    };
    let ranks = format!("{} × {}", plan.ranks, cluster.accelerator.name);
    format!(
        "<div class=\"tiles\">{}{}{}{}{}</div>\n",
        tile("ranks", &ranks, ""),
        tile("step", &time_text(estimate.step_s), ""),
        tile("tokens per second", &thousands(estimate.tokens_per_s), ""),
        tile("MFU", &format!("{:.1}%", 100.0 * estimate.mfu), ""),
        tile(if estimate.fits { "fits" } else { "does not fit" }, &room, class),
    )
}

/// Time breakdown as a bar, with the bottlenecks below.
fn step(proposal: &Proposal, cluster: &Cluster) -> String {
    let whole = proposal.estimate.step_s;
    let shown: Vec<(usize, &str, f64)> = time_breakdown(&proposal.estimate)
        .into_iter()
        .enumerate()
        .map(|(index, (name, seconds))| (index, name, seconds / whole))
        .filter(|(_, _, share)| *share >= 5e-4)
        .collect();
    let mut svg = String::from("<svg viewBox=\"0 0 1000 34\" role=\"img\" class=\"wide\">");
    let mut x = 0.0;
    for (index, name, share) in &shown {
        let width = 1000.0 * share;
        let _ = write!(
            svg,
            "<rect class=\"c{index}\" x=\"{x:.1}\" y=\"2\" width=\"{width:.1}\" height=\"30\"><title>{name}: {:.1}%</title></rect>",
            100.0 * share
        );
        x += width;
    }
    svg.push_str("</svg>");
    let legend = shown.iter().map(|(index, name, share)| {
        format!(
            "<li><i class=\"c{index}\"></i>{name}: {} ({:.1}%)</li>",
            time_text(share * whole),
            100.0 * share
        )
    });
    let words = bottlenecks(proposal, cluster)
        .iter()
        .map(|line| format!("<li>{}</li>", escape(line)))
        .collect::<String>();
    format!("{svg}<ul class=\"legend\">{}</ul><ul>{words}</ul>", legend.collect::<String>())
}

fn traffic(proposal: &Proposal, cluster: &Cluster) -> String {
    let flows: Vec<&Flow> =
        proposal.estimate.flows.iter().filter(|flow| flow.bytes > 0.0).collect();
    if flows.is_empty() {
        return String::new();
    }
    let rows = flows.iter().map(|flow| {
        format!(
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.0}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            group_name(flow.kind),
            flow.members,
            escape(&cluster.links[flow.link].name),
            flow.collective.name(),
            phase_name(flow.phase),
            flow.times,
            bytes_text(flow.bytes),
            bytes_text(flow.sent()),
            time_text(flow.total())
        )
    });
    let head = "<tr><th>group</th><th>ranks</th><th>link</th><th>collective</th><th>phase</th><th>calls</th><th>size</th>\
                <th>sent</th><th>time</th></tr>";
    format!("<table>{head}{}</table>", rows.collect::<String>())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// `1,234,567`.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
