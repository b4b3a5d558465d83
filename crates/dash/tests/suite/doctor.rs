//! The doctor names what limits a step and why a run failed.

use lockstep_dash::doctor::{Cause, Diagnosis, FailureClass, FailureKind};
use serde_json::json;

use crate::fake_run::FakeRun;

fn share(diagnosis: &Diagnosis, cause: &Cause) -> f64 {
    diagnosis.limits.iter().find(|limit| limit.cause == *cause).map_or(0.0, |limit| limit.share)
}

/// The largest limit besides compute.
fn bottleneck(diagnosis: &Diagnosis) -> Option<Cause> {
    let is_compute = |cause: &Cause| matches!(cause, Cause::Compute | Cause::MemoryBandwidth);
    let mut others = diagnosis.limits.iter().filter(|limit| !is_compute(&limit.cause));
    others.next().filter(|limit| limit.share >= 0.05).map(|limit| limit.cause.clone())
}

#[test]
fn a_healthy_run_is_limited_by_compute() {
    let run = FakeRun::new("healthy", 2, &["layout.data=2"]);
    let diagnosis = run.write().diagnose();
    assert_eq!(bottleneck(&diagnosis), None, "{diagnosis}");
    assert!(matches!(diagnosis.limits[0].cause, Cause::Compute | Cause::MemoryBandwidth));
    let sum: f64 = diagnosis.limits.iter().map(|limit| limit.share).sum();
    assert!((0.95..=1.001).contains(&sum), "{sum}");
    assert_eq!(diagnosis.exit_code(), 0);
}

#[test]
fn a_straggler_is_named() {
    for slow in [0, 3] {
        let mut run = FakeRun::new(&format!("straggler-{slow}"), 4, &["layout.data=4"]);
        run.compute[slow] = 180.0;
        run.wait = vec![82.0; 4];
        run.wait[slow] = 2.0;
        let diagnosis = run.write().diagnose();
        assert_eq!(bottleneck(&diagnosis), Some(Cause::Straggler { rank: slow }), "{diagnosis}");
        assert!(diagnosis.verdict.contains(&format!("rank {slow}")), "{}", diagnosis.verdict);
    }
}

#[test]
fn data_a_busy_host_checkpoints_and_communication_are_named() {
    type Change = fn(&mut FakeRun);
    let cases: [(&str, Change, Cause); 5] = [
        ("reading", |run| run.read = 40.0, Cause::Data),
        ("busy", |run| run.queue = 50.0, Cause::BusyHost),
        ("saves", |run| run.more = vec![("save_stall_s", json!(0.5))], Cause::Checkpoint),
        ("wait", |run| run.wait = vec![60.0; 2], Cause::Communication { axis: "data".into() }),
        (
            "imbalance",
            |run| run.more = vec![("expert_imbalance", json!(6.0))],
            Cause::ExpertImbalance,
        ),
    ];
    for (name, change, cause) in cases {
        let mut run = FakeRun::new(name, 2, &["layout.data=2"]);
        change(&mut run);
        let diagnosis = run.write().diagnose();
        assert_eq!(bottleneck(&diagnosis), Some(cause.clone()), "{name}: {diagnosis}");
        assert!(share(&diagnosis, &cause) > 0.05);
    }
}

#[test]
fn a_pipeline_bubble_is_named_and_uneven_stages_are_evidence() {
    let mut run = FakeRun::new("bubble", 2, &["layout.pipe=2", "train.micro_batch=16"]);
    run.pipe = vec![60.0, 5.0];
    run.compute = vec![60.0, 115.0];
    let diagnosis = run.write().diagnose();
    let bubble =
        diagnosis.limits.iter().find(|limit| limit.cause == Cause::Bubble).expect("a bubble");
    assert!(bubble.share > 0.05, "{diagnosis}");
    assert!(bubble.evidence.iter().any(|line| line.contains("uneven")), "{diagnosis}");
}

#[test]
fn advice_has_the_options_to_type_and_never_slows_down() {
    let mut run = FakeRun::new(
        "recompute",
        2,
        &["layout.data=2", "layout.recompute=full", "comm.bucket_mb=0.01"],
    );
    run.wait = vec![60.0; 2];
    let diagnosis = run.write().diagnose();
    let options: Vec<String> = diagnosis.advice.iter().map(|advice| advice.options()).collect();
    assert!(options.iter().any(|set| set.contains("--set layout.recompute=none")), "{options:?}");
    // Every candidate is either recommended or rejected with a reason.
    let rejected = diagnosis.rejected.iter().flat_map(|rejected| &rejected.sets);
    let considered: Vec<&String> =
        diagnosis.advice.iter().flat_map(|advice| &advice.sets).chain(rejected).collect();
    assert!(considered.iter().any(|set| set.starts_with("comm.bucket_mb=")), "{considered:?}");
    assert!(diagnosis.rejected.iter().all(|rejected| !rejected.why.is_empty()));
    for advice in &diagnosis.advice {
        assert!(advice.gain.is_none_or(|gain| (0.0..1.0).contains(&gain)), "{advice:?}");
    }
    // The calibrated simulator reproduces the run.
    let (predicted, measured) =
        (diagnosis.predicted_step_s.unwrap(), diagnosis.measured.unwrap().step);
    assert!((predicted / measured - 1.0).abs() < 0.1, "{predicted} {measured}");
}

/// Ten reductions per step become four with larger buckets. How much that saves depends on what the timeline says about
/// them: their latency is saved six times in ten, the time of their bytes is not.
#[test]
fn fewer_collectives_save_the_latency_that_the_timeline_shows() {
    let gain = |name: &str, calls: &[(u64, f64)]| {
        let mut run = FakeRun::new(name, 2, &["layout.data=2", "comm.bucket_mb=1"]);
        run.wait = vec![60.0; 2];
        let diagnosis = run.write().trace(calls).diagnose();
        let is_bucket = |sets: &[String]| sets == ["comm.bucket_mb=8"];
        let advice = diagnosis.advice.iter().find(|advice| is_bucket(&advice.sets));
        let rejected = diagnosis.rejected.iter().any(|rejected| is_bucket(&rejected.sets));
        assert!(advice.is_some() != rejected, "{diagnosis}");
        (advice.and_then(|advice| advice.gain), diagnosis.measured.unwrap().call_cost.unwrap())
    };
    // Each takes 6 ms, large or small. Of a step of 160 ms, 6 · 6 ms are saved.
    let equal: Vec<(u64, f64)> = (1..=10).map(|call| (call << 18, 6.0)).collect();
    let (saved, cost) = gain("latency", &equal);
    assert!((cost.latency - 0.006).abs() < 1e-9 && cost.latency_share > 0.999, "{cost:?}");
    assert_eq!(cost.calls, 10.0);
    let saved = saved.expect("a recommendation");
    assert!((saved - 36.0 / 160.0).abs() < 0.002, "{saved}");
    // Half of the time is latency: half of that is saved.
    let half: Vec<(u64, f64)> =
        (1..=10).map(|call| (call << 18, 3.0 + 6.0 * call as f64 / 11.0)).collect();
    let (saved, cost) = gain("half-latency", &half);
    assert!((cost.latency_share - 0.5).abs() < 1e-3, "{cost:?}");
    let saved = saved.expect("a recommendation");
    assert!((saved - 18.0 / 160.0).abs() < 0.002, "{saved}");
    // The time is proportional to the bytes: nothing is saved.
    let bytes: Vec<(u64, f64)> = (1..=10).map(|call| (call << 18, call as f64)).collect();
    let (saved, cost) = gain("bandwidth", &bytes);
    assert!(cost.latency_share < 1e-3, "{cost:?}");
    assert_eq!(saved, None);
}

#[test]
fn predictions_on_a_busy_host_are_called_unreliable() {
    for (queue, expected) in [(50.0, true), (2.0, false)] {
        let mut run = FakeRun::new(&format!("unreliable-{queue}"), 2, &["layout.data=2"]);
        run.queue = queue;
        let diagnosis = run.write().diagnose();
        let noted = diagnosis.notes.iter().any(|note| note.contains("unreliable"));
        assert_eq!(noted, expected, "{diagnosis}");
    }
}

#[test]
fn a_larger_batch_is_not_recommended_but_explained() {
    let mut run = FakeRun::new("batch", 2, &["layout.data=2"]);
    run.wait = vec![60.0; 2];
    let diagnosis = run.write().diagnose();
    assert!(diagnosis.advice.iter().all(|advice| !advice.options().contains("global_batch")));
    assert!(diagnosis.notes.iter().any(|note| note.contains("not a free fix")), "{diagnosis}");
}

#[test]
fn failures_are_recognized() {
    let cases: [(&str, &str, &[&str], FailureKind, FailureClass); 6] = [
        (
            "nan",
            "exited with code 1",
            &[
                "error: step 7: rank 1: layers.3 (its gradient) is not finite; the step was not applied",
            ],
            FailureKind::NotFinite,
            FailureClass::Deterministic,
        ),
        (
            "disk",
            "exited with code 1",
            &["error: /runs/x: No space left on device (os error 28)"],
            FailureKind::FullDisk,
            FailureClass::Infrastructure,
        ),
        (
            "killed",
            "was killed by SIGKILL",
            &["step 40/100 | loss 3.1"],
            FailureKind::Killed,
            FailureClass::Infrastructure,
        ),
        (
            "mismatch",
            "exited with code 1",
            &[
                "error: rank 1 has train.lr.min = 1, rank 0 has 2; use the same run file and --set on every rank",
            ],
            FailureKind::LaunchMismatch,
            FailureClass::Deterministic,
        ),
        (
            "memory",
            "was killed by SIGABRT",
            &["memory allocation of 68719476736 bytes failed"],
            FailureKind::OutOfMemory,
            FailureClass::Deterministic,
        ),
        (
            "port",
            "exited with code 1",
            &["error: rank 1 could not join: cannot reach 10.0.0.1:29400: Connection refused"],
            FailureKind::BlockedPort,
            FailureClass::Infrastructure,
        ),
    ];
    for (name, exit, lines, kind, class) in cases {
        let mut run = FakeRun::new(&format!("failed-{name}"), 2, &["layout.data=2"]);
        run.steps = 40;
        let diagnosis = run.write().fail(1, exit, lines).diagnose();
        let problem = diagnosis.problem.as_ref().expect("a problem");
        assert_eq!((problem.kind, problem.class), (kind, class), "{name}: {diagnosis}");
        assert_eq!(problem.rank, Some(1), "the failing rank, not rank 0");
        assert_eq!(diagnosis.exit_code(), 2);
        assert!(problem.log.iter().any(|line| lines.contains(&line.as_str())), "{problem:?}");
    }
}

#[test]
fn out_of_memory_shows_the_ledger_and_ways_to_fit() {
    let mut run = FakeRun::new("oom", 2, &["layout.data=2"]);
    run.steps = 40;
    run.write().fail(1, "was killed by SIGABRT", &["memory allocation of 9 bytes failed"]);
    let problem = run.diagnose().problem.expect("a problem");
    assert!(problem.ledger.iter().any(|(line, bytes)| line == "activations" && *bytes > 0));
    assert!(!problem.fixes.is_empty() && problem.fixes.len() <= 3, "{problem:?}");
    assert!(problem.fixes.iter().all(|fix| fix.saved > 0));
}

#[test]
fn a_slow_link_is_named_with_its_rates() {
    let mut run = FakeRun::new("slow-link", 2, &["layout.data=2"]);
    run.wait = vec![60.0; 2];
    let link = json!({ "ranks": [0, 1], "bytes_per_s": 1e8, "expected_bytes_per_s": 1e9 });
    run.more = vec![("slow_link", link)];
    let diagnosis = run.write().diagnose();
    assert_eq!(bottleneck(&diagnosis), Some(Cause::SlowLink { ranks: (0, 1) }), "{diagnosis}");
    let text = diagnosis.to_string();
    assert!(text.contains("100.0 MB/s, 10% of the expected 1.0 GB/s"), "{text}");
    assert!(text.contains("repair or replace the link"), "{text}");
}

#[test]
fn scaling_efficiency_compares_with_a_run_on_fewer_ranks() {
    let one = FakeRun::new("scaling/one", 1, &[]);
    one.write();
    let mut four = FakeRun::new("scaling/four", 4, &["layout.data=4"]);
    // A quarter of the work takes a quarter of the time, and communication as much again.
    four.compute = vec![25.0; 4];
    four.wait = vec![26.0; 4];
    let diagnosis = four.write().diagnose();
    let scaling = diagnosis.scaling.clone().expect("a run on one rank");
    assert!((scaling.efficiency - 0.5).abs() < 0.02, "{scaling:?}");
    assert!(diagnosis.to_string().contains("scaling efficiency: 50%"), "{diagnosis}");
    assert!(one.diagnose().scaling.is_none());
}

#[test]
fn a_replay_tells_data_from_machines() {
    let lines = ["error: step 12: rank 1: layers.3 is not finite; the step was not applied"];
    for (record, class, text) in [
        (
            json!({ "step": 12, "differs": true, "ranks": [1] }),
            FailureClass::Infrastructure,
            "rank 1",
        ),
        (
            json!({ "step": 12, "samples": [3, 7] }),
            FailureClass::DataDependent,
            "caused by sample 7 of step 12",
        ),
        (json!({ "step": 12 }), FailureClass::Deterministic, "bit for bit"),
        // A replay of another step says nothing.
        (json!({ "step": 11, "finite": true }), FailureClass::Deterministic, "NaN or infinity"),
    ] {
        let run = FakeRun::new("replay", 2, &["layout.data=2"]);
        run.write().fail(0, "exited with code 1", &lines);
        std::fs::write(run.path.join("logs/replays.jsonl"), format!("{record}\n")).unwrap();
        let diagnosis = run.diagnose();
        let problem = diagnosis.problem.clone().expect("a failed run");
        assert_eq!((problem.class, problem.rank), (class, Some(1)), "{record}: {diagnosis}");
        assert!(diagnosis.to_string().contains(text), "{record}: {diagnosis}");
    }
}

#[test]
fn uneven_stages_get_advice() {
    let mut run = FakeRun::new("uneven", 2, &["layout.pipe=2", "model.layers=3"]);
    (run.compute, run.wait, run.pipe) = (vec![100.0, 60.0], vec![0.0; 2], vec![10.0, 50.0]);
    let diagnosis = run.write().diagnose();
    let text = diagnosis.to_string();
    assert!(text.contains("the stages are uneven"), "{text}");
    assert!(text.contains("balance the stages: 3 layers on 2 stages"), "{text}");
}

#[test]
fn the_fullest_expert_is_named() {
    let mut run = FakeRun::new("experts", 2, &["layout.data=2"]);
    run.more = vec![("expert_imbalance", json!(3.0))];
    run.experts = vec![vec![1.0, 1.0], vec![0.1, 1.9]];
    let text = run.write().diagnose().to_string();
    assert!(text.contains("the fullest is expert 1 of layer 1: 1.9× the mean"), "{text}");
}

#[test]
fn slow_storage_is_named() {
    let mut run = FakeRun::new("slow-storage", 2, &["layout.data=2"]);
    run.more = vec![
        ("save_stall_s", json!(0.5)),
        ("save_bytes", json!(8_000_000)),
        ("save_s", json!(2.0)),
    ];
    let text = run.write().diagnose().to_string();
    assert!(text.contains("8.0 MB are written in 2.00 s (4.0 MB/s: slow storage)"), "{text}");
}
