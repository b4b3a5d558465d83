//! Timelines of real runs on threads.

use std::path::PathBuf;

use lockstep_comm::on_threads;
use lockstep_comm::trace::SpanKind;
use lockstep_events::trace::{TRACE_DIR, TRACE_REQUEST, Timeline, merged_path, trace_folders};
use lockstep_kernels::Device;
use lockstep_trainer::{Event, Run, run};

use crate::plans::{plan, source};

/// Trains in a new folder, which is returned, and counts the reported timelines.
fn train(name: &str, ranks: usize, sets: &[&str], ask: bool) -> (PathBuf, usize) {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("timeline-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join(TRACE_DIR)).unwrap();
    if ask {
        std::fs::write(folder.join(TRACE_DIR).join(TRACE_REQUEST), "2").unwrap();
    }
    let (plan, source) = (plan(ranks, sets), source());
    let traced = on_threads(ranks, |world| {
        let run_of_rank = Run {
            plan: &plan,
            device: Device::cpu(1),
            group: &world,
            source: &source,
            folder: &folder,
            start: None,
            generation: None,
            // A slow step, so that the request is seen before the run ends.
            stop: &|| {
                if ask {
                    std::thread::sleep(std::time::Duration::from_millis(120));
                }
                false
            },
        };
        let mut traced = 0;
        run(&run_of_rank, &mut |event| traced += usize::from(matches!(event, Event::Traced(_))))
            .unwrap();
        traced
    });
    (folder, traced.into_iter().sum())
}

#[test]
fn a_timeline_agrees_with_the_step_report() {
    for (name, sets) in [
        ("data", &["layout.data=2", "trace.steps=2..3", "train.steps=4"][..]),
        ("zero", &["layout.data=2", "layout.zero=3", "trace.steps=2..3", "train.steps=4"]),
        ("tensor", &["layout.tensor=2", "trace.steps=2..3", "train.steps=4"]),
        ("pipe", &["layout.pipe=2", "train.micro_batch=1", "trace.steps=2..3", "train.steps=4"]),
    ] {
        let (folder, traced) = train(name, 2, sets, false);
        assert_eq!(traced, 1, "{name}");
        let [trace] = &trace_folders(&folder)[..] else { panic!("{name}: one timeline") };
        assert!(merged_path(trace).exists());
        let timeline = Timeline::read(trace).unwrap();
        assert_eq!((timeline.ranks.len(), timeline.steps()), (2, Some((2, 3))));
        for (rank, breakdown) in timeline.ranks.iter().zip(timeline.breakdowns()) {
            let reported = rank.steps.iter().map(|step| step.exposed).sum::<f64>() / 2.0;
            let difference = (breakdown.exposed / reported - 1.0).abs();
            assert!(difference <= 0.001, "{name}: {} and {reported}", breakdown.exposed);
            assert_eq!(breakdown.steps, 2);
            assert!(breakdown.forward > 0.0 && breakdown.backward > 0.0, "{name}: {breakdown:?}");
            assert!(rank.spans.iter().any(|span| span.kind == SpanKind::Optimizer));
            assert!(!rank.memory.is_empty() && rank.dropped == 0);
        }
        // Every collective has all of its members, and every message both ends.
        let calls = timeline.calls();
        assert!(!calls.is_empty() && calls.iter().all(|members| members.len() == 2), "{name}");
        let path = timeline.critical_path(3).unwrap();
        assert!(path.parts.windows(2).all(|two| two[0].end <= two[1].end), "{name}: {path:?}");
    }
}

#[test]
fn recompute_and_data_have_spans() {
    let sets = ["layout.recompute=full", "trace.steps=2..2", "train.steps=2"];
    let (folder, _) = train("recompute", 1, &sets, false);
    let timeline = Timeline::read(&trace_folders(&folder)[0]).unwrap();
    let breakdown = &timeline.breakdowns()[0];
    assert!(breakdown.recompute > 0.0 && breakdown.data > 0.0, "{breakdown:?}");
    let classes: Vec<&str> = breakdown.kernels.iter().map(|kernel| kernel.class.as_str()).collect();
    assert!(classes.contains(&"matmul") && classes.contains(&"attention"), "{classes:?}");
}

#[test]
fn a_running_job_records_what_is_asked_for() {
    let (folder, traced) = train("asked", 2, &["layout.data=2", "train.steps=12"], true);
    assert_eq!(traced, 1);
    let timeline = Timeline::read(&trace_folders(&folder)[0]).unwrap();
    let (first, last) = timeline.steps().unwrap();
    assert_eq!(last - first, 1, "two steps");
    assert!(!folder.join(TRACE_DIR).join(TRACE_REQUEST).exists(), "the request is taken");
}

#[test]
fn nothing_is_recorded_without_being_asked() {
    let (folder, traced) = train("off", 2, &["layout.data=2", "train.steps=2"], false);
    assert_eq!((traced, trace_folders(&folder).len()), (0, 0));
    assert!(folder.join("ranks.jsonl").exists());
}
