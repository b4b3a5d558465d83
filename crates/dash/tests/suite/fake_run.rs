//! Writes a run folder.

use std::path::{Path, PathBuf};

use lockstep_dash::RunFolder;
use lockstep_dash::doctor::{Diagnosis, diagnose};
use lockstep_events::trace::{FileCall, FileSpan, RankTrace, trace_folder};
use lockstep_events::{RankTimes, StepReport};
use lockstep_plan::{Config, Environment, Plan};
use lockstep_types::Collective;
use lockstep_types::trace::SpanKind;
use serde_json::{Value, json};

/// A run folder that is removed with the test. Times are milliseconds per step.
pub struct FakeRun {
    pub path: PathBuf,
    pub plan: Plan,
    pub steps: usize,
    pub compute: Vec<f32>,
    pub wait: Vec<f32>,
    pub pipe: Vec<f32>,
    pub read: f32,
    pub queue: f32,
    /// Loads of experts by layer.
    pub experts: Vec<Vec<f32>>,
    /// Written into every report.
    pub more: Vec<(&'static str, Value)>,
}

impl FakeRun {
    /// A healthy run of a small Llama on `ranks` ranks, with overrides.
    pub fn new(name: &str, ranks: usize, sets: &[&str]) -> FakeRun {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("dash-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(path.join("logs")).unwrap();
        let text = "[model]\nfamily = \"llama\"\ndim = 256\nlayers = 8\nheads = 4\nseq = 256\nvocab = 512\n\
                    [train]\nsteps = 100\nglobal_batch = 32\nmicro_batch = 4";
        let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
        let config = Config::parse(text, &sets);
        let plan =
            Plan::resolve(&config, &Environment::one_host(ranks, 1).with_vocab(512)).unwrap();
        FakeRun {
            path,
            steps: 100,
            compute: vec![100.0; ranks],
            wait: vec![2.0; ranks],
            pipe: Vec::new(),
            read: 0.2,
            queue: 0.1,
            experts: Vec::new(),
            more: Vec::new(),
            plan,
        }
    }

    /// Seconds of a step: that of the rank that takes longest.
    fn step(&self) -> f64 {
        let of = |rank: usize| f64::from(self.compute[rank] + self.wait[rank]);
        (0..self.compute.len()).map(of).fold(0.0, f64::max) / 1e3
    }

    pub fn write(&self) -> &FakeRun {
        let (plan, step) = (&self.plan, self.step());
        std::fs::write(self.path.join("plan.json"), serde_json::to_string(plan).unwrap()).unwrap();
        std::fs::write(self.path.join("generation"), "1").unwrap();
        let (mut metrics, mut ranks) = (String::new(), String::new());
        for number in (10..=self.steps).step_by(10) {
            let mut report = StepReport {
                loss: Some(5.0 / number as f64),
                tokens_per_s: Some(plan.tokens_per_step() as f64 / step),
                mfu: Some(0.5),
                comm_exposed: Some(0.02),
                elapsed_s: Some(step * number as f64),
                ..StepReport::of(number, 100)
            };
            report.more.insert("peak_flops".into(), json!(2e10));
            let exposed = json!({ "data": f64::from(self.wait[0]) / 1e3 });
            report.more.insert("exposed_s".into(), exposed);
            for (key, value) in &self.more {
                report.more.insert(key.to_string(), value.clone());
            }
            metrics += &format!("{}\n", serde_json::to_string(&report).unwrap());
            let mut wait = self.wait.clone();
            wait.iter_mut().zip(&self.pipe).for_each(|(wait, pipe)| *wait += pipe);
            let times = RankTimes {
                step: number,
                compute_ms: self.compute.clone(),
                wait_ms: wait,
                pipe_ms: self.pipe.clone(),
                read_ms: vec![self.read; self.compute.len()],
                queue_ms: vec![self.queue; self.compute.len()],
                memory: vec![50 << 20; self.compute.len()],
                experts: self.experts.clone(),
            };
            ranks += &format!("{}\n", serde_json::to_string(&times).unwrap());
        }
        std::fs::write(self.path.join("metrics.jsonl"), metrics).unwrap();
        std::fs::write(self.path.join("ranks.jsonl"), ranks).unwrap();
        self
    }

    /// Adds a timeline of one step, in which every rank makes these collectives: bytes and milliseconds of each.
    pub fn trace(&self, calls: &[(u64, f64)]) -> &FakeRun {
        let nanos = |ms: f64| (1e6 * ms) as u64;
        let span = |kind, name: &str, start, duration| FileSpan {
            kind,
            name: name.into(),
            thread: 0,
            start,
            duration,
            step: (kind == SpanKind::Step).then_some(90),
            block: None,
            stage: None,
            micro: None,
            bytes: None,
            call: None,
        };
        let (mut spans, mut at) = (Vec::new(), 0);
        for (seq, (bytes, ms)) in calls.iter().enumerate() {
            let (op, group, algo) = (Collective::AllReduce, "copies".into(), "direct".into());
            let call =
                FileCall { op, algo, group, id: 1, members: 2, seq: seq as u64, message: None };
            let exposed = span(SpanKind::Exposed, "data", at, nanos(*ms));
            let call = FileSpan {
                bytes: Some(*bytes),
                call: Some(call),
                ..span(SpanKind::Call, "all_reduce", at, nanos(*ms))
            };
            spans.extend([exposed, call]);
            at += nanos(*ms);
        }
        spans.push(span(SpanKind::Step, "step 90", 0, at + nanos(f64::from(self.compute[0]))));
        for rank in 0..self.plan.ranks {
            let trace = RankTrace {
                rank,
                ranks: self.plan.ranks,
                spans: spans.clone(),
                ..RankTrace::default()
            };
            trace.write(&trace_folder(&self.path, 90, 90)).unwrap();
        }
        self
    }

    /// Adds a failure of the last generation, with the last lines of the rank's log.
    pub fn fail(&self, rank: usize, exit: &str, lines: &[&str]) -> &FakeRun {
        let failure = json!({
            "rank": rank, "generation": 1, "exit": exit, "code": 1, "oom_kills": null, "tail": lines, "time": 1,
        });
        std::fs::write(self.path.join("logs/failures.jsonl"), format!("{failure}\n")).unwrap();
        let log = format!("--- generation 1 ---\n{}\n", lines.join("\n"));
        std::fs::write(self.path.join(format!("logs/rank-{rank}.log")), log).unwrap();
        self
    }

    pub fn diagnose(&self) -> Diagnosis {
        diagnose(&RunFolder::open(&self.path).unwrap(), None)
    }
}

impl Drop for FakeRun {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
