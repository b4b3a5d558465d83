//! Timelines of two ranks whose clocks differ, built by hand.

use std::collections::BTreeMap;

use lockstep_events::trace::{
    ClockFit, FileCall, FileSpan, RankTrace, StepTime, Timeline, compare, merged_path, report,
    trace_folder, trace_folders, write_chrome,
};
use lockstep_types::Collective;
use lockstep_types::trace::SpanKind;
use serde_json::Value;

use crate::folder::Folder;

const MS: u64 = 1_000_000;

fn span(kind: SpanKind, name: &str, start: u64, end: u64) -> FileSpan {
    FileSpan {
        kind,
        name: name.into(),
        thread: 1,
        start: start * MS,
        duration: (end - start) * MS,
        step: None,
        block: None,
        stage: None,
        micro: None,
        bytes: None,
        call: None,
    }
}

fn all_reduce(start: u64, end: u64) -> FileSpan {
    let call = FileCall {
        op: Collective::AllReduce,
        algo: "direct".into(),
        group: "data".into(),
        id: 7,
        members: 2,
        seq: 1,
        message: None,
    };
    FileSpan {
        call: Some(call),
        bytes: Some(4096),
        ..span(SpanKind::Call, "all_reduce", start, end)
    }
}

/// Rank 0 computes 10 ms and waits for rank 1, which computes 30 ms. The reduction itself takes 5 ms.
fn two_ranks() -> Vec<RankTrace> {
    let step = |end| FileSpan { step: Some(3), ..span(SpanKind::Step, "step", 0, end) };
    let rank = |rank: usize, compute: u64| RankTrace {
        run: "test".into(),
        rank,
        ranks: 2,
        host: "here".into(),
        coord: format!("data={rank}"),
        steps: vec![StepTime { step: 3, seconds: 0.036, exposed: (35 - compute) as f64 / 1e3 }],
        blocks: vec!["layers.0".into()],
        tags: vec!["parameters".into(), "activations".into()],
        memory: vec![lockstep_events::trace::MemoryCounter { at: MS, bytes: vec![10, 20] }],
        spans: vec![
            all_reduce(compute, 35),
            span(SpanKind::Exposed, "data", compute, 35),
            FileSpan {
                block: Some(0),
                micro: Some(0),
                ..span(SpanKind::Block, "forward", 0, compute)
            },
            span(SpanKind::Kernel, "matmul", 1, compute),
            span(SpanKind::Optimizer, "optimizer", 35, 36),
            // Rank 0 ends last.
            step(37 - rank as u64),
        ],
        ..RankTrace::default()
    };
    let mut ranks = vec![rank(0, 10), rank(1, 30)];
    // The clock of rank 1 is 500 ms ahead.
    for span in &mut ranks[1].spans {
        span.start += 500 * MS;
    }
    ranks[1].memory[0].at += 500 * MS;
    ranks[1].clock = ClockFit { at: 0, offset: -(500.0 * MS as f64), drift: 0.0, error: 2_000.0 };
    ranks
}

#[test]
fn waiting_is_split_from_moving_data() {
    let timeline = Timeline::new(two_ranks());
    let [first, second] = &timeline.breakdowns()[..] else { panic!("two ranks") };
    let close =
        |value: f64, expected: f64| assert!((value - expected).abs() < 1e-9, "{value} {expected}");
    close(first.exposed, 0.025);
    close(first.axes[0].waiting, 0.020);
    close(first.axes[0].moving, 0.005);
    close(first.forward, 0.010);
    close(first.optimizer, 0.001);
    close(second.axes[0].waiting, 0.0);
    close(second.compute, 0.031);
    close(second.kernels[0].seconds, 0.029);
    close(timeline.alignment_error(), 2e-6);
    assert_eq!(timeline.steps(), Some((3, 3)));
}

#[test]
fn the_critical_path_follows_the_rank_that_others_wait_for() {
    let path = Timeline::new(two_ranks()).critical_path(3).unwrap();
    let forward: BTreeMap<usize, f64> = path
        .totals()
        .into_iter()
        .filter(|(_, activity, _)| activity == "forward")
        .map(|(rank, _, seconds)| (rank, seconds))
        .collect();
    // All 30 ms of rank 1, and nothing of the 10 ms that rank 0 computed before it waited.
    assert_eq!(forward.get(&0), None);
    assert!((forward[&1] - 0.030).abs() < 1e-9, "{path:?}");
    let total: f64 = path.totals().iter().map(|(.., seconds)| seconds).sum();
    assert!((total - path.seconds).abs() < 1e-9, "{path:?}");
}

#[test]
fn the_merged_file_has_tracks_arrows_and_counters() {
    let folder = Folder::new("trace-merged");
    let traces = trace_folder(folder.path(), 3, 3);
    two_ranks().iter().for_each(|rank| rank.write(&traces).unwrap());
    assert_eq!(trace_folders(folder.path()), std::slice::from_ref(&traces));
    let timeline = Timeline::read(&traces).unwrap();
    let path = merged_path(&traces);
    write_chrome(&timeline, &path).unwrap();
    let file: Value = serde_json::from_slice(&unzipped(&path)).unwrap();
    let events = file["traceEvents"].as_array().unwrap();
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    // Six spans per rank, and two parts of each call.
    assert_eq!((count("X"), count("s"), count("f"), count("C")), (16, 1, 1, 2));
    let named =
        |name: &str| events.iter().filter(|event| event["name"] == name).collect::<Vec<_>>();
    assert_eq!(named("forward layers.0")[0]["args"]["micro_batch"], 0);
    assert_eq!(named("all_reduce")[0]["args"]["algorithm"], "direct");
    let starts: Vec<f64> =
        named("step 3").iter().map(|event| event["ts"].as_f64().unwrap()).collect();
    assert_eq!(starts, [0.0, 0.0], "clocks are aligned");
    assert_eq!(file["otherData"]["clock_error_us"], 2.0);
    let arrow = |phase: &str| events.iter().find(|event| event["ph"] == phase).unwrap();
    // The last member to arrive lets the other one go on.
    assert_eq!((&arrow("s")["pid"], &arrow("f")["pid"]), (&1.into(), &0.into()));
}

fn unzipped(path: &std::path::Path) -> Vec<u8> {
    use std::io::Read as _;
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap())
        .read_to_end(&mut text)
        .unwrap();
    text
}

#[test]
fn text_and_comparison() {
    let timeline = Timeline::new(two_ranks());
    let text = report(&timeline);
    for part in [
        "steps 3 to 3: 2 rank(s), 12 spans; clocks aligned within 2 µs",
        "critical path of step 3 (37.00 ms, 1 change(s) of rank)",
        "rank 1 forward",
        "longest spans",
        "all_reduce #1 in data (0.0 MiB)",
    ] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    let mut faster = two_ranks();
    faster.truncate(1);
    let text = compare(&timeline, &Timeline::new(faster));
    assert!(text.lines().any(|line| line.contains("forward") && line.contains("-50.0%")), "{text}");
}
