//! Text tables, JSON and HTML.

use crate::tables::plan;
use lockstep_plan::schedule::Schedule;
use lockstep_sim::report::{Report, html, matrix, text};
use lockstep_sim::search::Proposal;
use lockstep_sim::{Cluster, Options, estimate};

fn proposal() -> (Proposal, Cluster) {
    let typed = "name = \"a <b>\"\n[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
                 [layout]\ndata = 2\nzero = 1\ntensor = 2\nsequence = true\ncontext = 2\npipe = 4\n[precision]\ncompute = \"bf16\"\n";
    let cluster = Cluster::named("h100-32").unwrap();
    let plan = plan(typed, 32);
    let estimate = estimate(&plan, &cluster, &Options::default());
    (Proposal { plan, estimate }, cluster)
}

#[test]
fn tables_fit_a_terminal() {
    let (proposal, cluster) = proposal();
    let text = text(&proposal, &cluster);
    for line in text.lines() {
        assert!(line.chars().count() <= 120, "{line}");
    }
    for part in
        ["memory per rank", "traffic per rank", "time breakdown", "pipeline timeline", "fits"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

/// Rows that are too long are cut; up to there they show every pass.
#[test]
fn the_pipeline_drawing_omits_no_pass() {
    for (pipe, more) in [
        (4, ""),
        (8, ""),
        (16, ""),
        (4, "schedule = \"interleaved\"\nchunks = 2"),
        (8, "schedule = \"zb-h1\""),
    ] {
        let typed = format!(
            "[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
             [layout]\npipe = {pipe}\n{more}\n[precision]\ncompute = \"bf16\"\n"
        );
        let (plan, cluster) = (plan(&typed, pipe), Cluster::built_in("h100").unwrap());
        let estimate = estimate(&plan, &cluster, &Options::default());
        let text = text(&Proposal { plan: plan.clone(), estimate }, &cluster);
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("rank ")).collect();
        assert_eq!(rows.len(), pipe, "{text}");
        let micros = pipe.max(4);
        let Schedule { kind, ranks, chunks, .. } = plan.schedule();
        let drawn = Schedule::new(kind, ranks, chunks, micros).unwrap();
        for (row, actions) in rows.iter().zip(&drawn.actions) {
            let shown: Vec<&str> =
                row.split([' ', '.', '…']).filter(|word| !word.is_empty()).skip(2).collect();
            let wanted = actions.iter().map(|action| match chunks {
                1 => format!("{}{}", action.act.letter(), action.micro),
                _ => action.to_string(),
            });
            assert!(row.chars().count() <= 120 && shown.len() >= 4, "{text}");
            assert!(row.ends_with('…') || shown.len() == actions.len(), "{text}");
            assert!(wanted.zip(&shown).all(|(wanted, shown)| wanted == **shown), "{text}");
        }
    }
}

#[test]
fn a_report_has_every_stage_and_flow() {
    let (proposal, cluster) = proposal();
    let report = Report::of(&proposal, &cluster);
    assert_eq!((report.memory.len(), report.ranks), (4, 32));
    assert!(report.fits && report.over_bytes < 0.0 && !report.traffic.is_empty());
    let most =
        report.memory.iter().map(|stage| stage.total - stage.available).fold(f64::MIN, f64::max);
    assert_eq!(most, report.over_bytes);
}

/// The matrix contains all traffic, with or without merged ranks.
#[test]
fn the_matrix_has_all_traffic() {
    let (proposal, _) = proposal();
    let [fine, coarse] = [64, 8].map(|most| matrix(&proposal, most));
    assert_eq!((fine.side, fine.each, coarse.side, coarse.each), (32, 1, 8, 4));
    let sum = |bytes: &[f64]| bytes.iter().sum::<f64>();
    assert!((sum(&fine.bytes) / sum(&coarse.bytes) - 1.0).abs() < 1e-9);
    assert!(
        (0..32).all(|rank| fine.bytes[rank * 32 + rank] == 0.0),
        "a rank sends nothing to itself"
    );
    // Tensor neighbours (innermost axis) exchange the most bytes.
    let row = &fine.bytes[..32];
    let loudest = (0..32).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
    assert_eq!(loudest, 1);
}

#[test]
fn the_page_is_self_contained() {
    let (proposal, cluster) = proposal();
    let page = html(&proposal, &cluster, &[("notes", "a < b & c".into())]);
    assert!(
        page.contains("a &lt; b &amp; c")
            && page.contains("a &lt;b&gt;")
            && !page.contains("<b>\"")
    );
    for needless in ["<script", "http://", "https://", "<link", "@import"] {
        assert!(!page.contains(needless), "{needless}");
    }
    for part in ["Memory by stage", "Pipeline timeline", "Communication matrix", "Rank map"] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
}

#[test]
fn clusters_by_name() {
    let cluster = Cluster::named("a100-80-384").unwrap();
    assert_eq!((cluster.ranks, cluster.accelerator.name.as_str()), (Some(384), "A100-80"));
    assert_eq!(Cluster::named("a100-80").unwrap().ranks, None);
    let unknown = Cluster::named("h10-64").unwrap_err();
    assert!(unknown.contains("did you mean `h100-64`?"), "{unknown}");
    assert!(Cluster::named("h100-0").is_err());
}
