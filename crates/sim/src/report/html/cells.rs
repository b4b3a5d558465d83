//! Communication matrix and rank map.

use std::fmt::Write;

use super::super::{bytes_text, map};
use crate::Cluster;
use crate::search::Proposal;

/// Maximum rows of the matrix and ranks of the map.
const MOST_ROWS: usize = 64;
const MOST_RANKS: usize = 128;

/// The communication matrix; empty without communication.
pub(super) fn matrix(proposal: &Proposal) -> String {
    match proposal.estimate.flows.is_empty() {
        true => String::new(),
        false => squares(proposal),
    }
}

/// Darker cells carry more bytes.
fn squares(proposal: &Proposal) -> String {
    let cells = map::matrix(proposal, MOST_ROWS);
    let size = 640.0 / cells.side as f64;
    let most = cells.bytes.iter().copied().fold(0.0, f64::max);
    let mut svg =
        String::from("<svg viewBox=\"0 0 660 660\" role=\"img\" style=\"width:min(100%,660px)\">");
    svg.push_str("<rect class=\"frame\" x=\"10\" y=\"10\" width=\"640\" height=\"640\"/>");
    for from in 0..cells.side {
        for to in 0..cells.side {
            let bytes = cells.bytes[from * cells.side + to];
            if bytes <= 0.0 {
                continue;
            }
            // Logarithmic, so that a thousandth of the maximum is still visible.
            let shade = (1.0 + (bytes / most).log10() / 4.0).clamp(0.08, 1.0);
            let name = |at: usize| match cells.each {
                1 => format!("rank {at}"),
                each => format!("ranks {}–{}", at * each, (at + 1) * each - 1),
            };
            let _ = write!(
                svg,
                "<rect class=\"heat\" fill-opacity=\"{shade:.2}\" x=\"{:.2}\" y=\"{:.2}\" width=\"{size:.2}\" height=\"{size:.2}\"><title>{} to {}: {}</title></rect>",
                10.0 + to as f64 * size,
                10.0 + from as f64 * size,
                name(from),
                name(to),
                bytes_text(bytes)
            );
        }
    }
    svg.push_str("</svg>");
    let each =
        if cells.each > 1 { format!("A cell is {} ranks. ", cells.each) } else { String::new() };
    format!(
        "{svg}<p>Bytes sent from row to column in one step. {each}Maximum: {}.</p>",
        bytes_text(most)
    )
}

/// Hosts as rows and ranks as boxes, coloured by stage and labelled with coordinates.
pub(super) fn rank_map(proposal: &Proposal, cluster: &Cluster) -> String {
    let (plan, mesh) = (&proposal.plan, proposal.plan.mesh());
    let per_host = cluster.per_host.min(plan.ranks);
    let shown = plan.ranks.min(MOST_RANKS / per_host.max(1) * per_host).max(per_host);
    let columns = per_host.min(16);
    let width = 920.0 / columns as f64;
    let rows = shown.div_ceil(columns);
    let mut svg =
        format!("<svg viewBox=\"0 0 1000 {}\" role=\"img\" class=\"wide\">", rows * 26 + 4);
    for rank in 0..shown {
        let coord = mesh.coord(rank);
        let (x, y) = (75.0 + (rank % columns) as f64 * width, rank / columns * 26 + 2);
        if rank % per_host == 0 {
            let _ = write!(svg, "<text x=\"0\" y=\"{}\">host {}</text>", y + 15, rank / per_host);
        }
        let place = [
            ('p', mesh.pipe, coord.pipe),
            ('d', mesh.data, coord.data),
            ('c', mesh.context, coord.context),
            ('t', mesh.tensor, coord.tensor),
        ];
        let place: Vec<String> = place
            .iter()
            .filter(|(_, size, _)| *size > 1)
            .map(|(letter, _, at)| format!("{letter}{at}"))
            .collect();
        let _ = write!(
            svg,
            "<rect class=\"c{} cell\" fill-opacity=\"0.35\" x=\"{x:.1}\" y=\"{y}\" width=\"{:.1}\" height=\"22\"><title>rank {rank}</title></rect><text x=\"{:.1}\" y=\"{}\">{}</text>",
            coord.pipe % 10,
            width - 3.0,
            x + 4.0,
            y + 15,
            place.join(" ")
        );
    }
    svg.push_str("</svg>");
    let rest = match plan.ranks - shown {
        0 => String::new(),
        rest => format!(" The other {rest} ranks continue in the same way."),
    };
    format!(
        "{svg}<p>p: pipeline stage (and colour), d: data, c: context, t: tensor coordinate.{rest}</p>"
    )
}
