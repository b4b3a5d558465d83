//! Timelines of a run: switches the recorder on for the asked steps, aligns the clocks before and after them, and writes
//! the files. Steps are named by the plan, or asked for while the run is in progress with the file `trace/request`.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lockstep_comm::Group;
use lockstep_events::trace::{
    ClockFit, ClockSample, RankTrace, StepTime, TRACE_DIR, TRACE_REQUEST, Timeline, merged_path,
    trace_folder, write_chrome,
};
use lockstep_kernels::Tag;
use lockstep_plan::{Plan, TraceSteps};

use crate::agree::first_error;
use crate::{Error, Rank, StepResult};

/// Steps of a timeline that was asked for without a number.
const DEFAULT_STEPS: u64 = 3;
/// Most steps of a timeline that was asked for.
const MOST_STEPS: u64 = 1000;
/// Time between two looks at the request file.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Questions to rank 0 for its time. The fastest answer counts.
const CLOCK_ROUNDS: usize = 16;

/// Records the timelines of one rank.
pub(crate) struct TimelineRecorder<'a> {
    plan: &'a Plan,
    group: &'a Group,
    folder: &'a Path,
    window: Option<TraceSteps>,
    before: Vec<ClockSample>,
    steps: Vec<StepTime>,
    looked: Instant,
    /// Merges the files on rank 0.
    merge: Option<JoinHandle<std::io::Result<MergedTrace>>>,
}

/// A merged timeline.
#[derive(Clone, Debug)]
pub struct MergedTrace {
    pub path: PathBuf,
    pub first: u64,
    pub last: u64,
    /// Bound of the clock alignment error, in seconds.
    pub clock_error: f64,
}

impl<'a> TimelineRecorder<'a> {
    pub fn new(plan: &'a Plan, group: &'a Group, folder: &'a Path) -> TimelineRecorder<'a> {
        TimelineRecorder {
            plan,
            group,
            folder,
            window: plan.trace,
            before: Vec::new(),
            steps: Vec::new(),
            looked: Instant::now(),
            merge: None,
        }
    }

    /// The number of steps that were asked for since the last call, 0 for none. Looks on rank 0 only.
    pub fn requested(&mut self) -> u64 {
        if self.group.rank() != 0 || self.looked.elapsed() < LOOK_EVERY {
            return 0;
        }
        self.looked = Instant::now();
        let path = self.folder.join(TRACE_DIR).join(TRACE_REQUEST);
        let Ok(text) = std::fs::read_to_string(&path) else { return 0 };
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!("cannot remove {}: {error}", path.display());
            return 0;
        }
        text.trim().parse().unwrap_or(DEFAULT_STEPS).clamp(1, MOST_STEPS)
    }

    /// Traces `count` steps after `step`, as all ranks agreed. Ignored while another timeline is recorded.
    pub fn request(&mut self, step: u64, count: u64) {
        let busy = self.window.is_some_and(|window| step < window.last as u64);
        if count > 0 && !busy {
            let first = step as usize + 1;
            self.window = Some(TraceSteps { first, last: step as usize + count as usize });
        }
    }

    /// Starts recording if `step` is the first of the window. Collective.
    pub fn begin(&mut self, rank: &Rank<'_>, step: u64) -> Result<(), Error> {
        // A run that resumes inside the window records the rest of it.
        let inside = |window: TraceSteps| (window.first..=window.last).contains(&(step as usize));
        let tracer = self.group.tracer();
        if !self.window.is_some_and(inside) || tracer.is_on() {
            return Ok(());
        }
        self.before = ask_clock(self.group)?;
        rank.device.meter().trace(tracer);
        rank.device.meter().switch(true);
        tracer.take();
        tracer.switch(true);
        Ok(())
    }

    /// Ends a step: adds its times and, after the last step of the window, writes the files. Returns a merged timeline
    /// when it is ready, on rank 0. Collective.
    pub fn end(
        &mut self,
        rank: &Rank<'_>,
        step: u64,
        stepped: &StepResult,
    ) -> Result<Option<MergedTrace>, Error> {
        let tracer = self.group.tracer();
        if tracer.is_on() {
            self.steps.push(StepTime {
                step,
                seconds: stepped.time.as_secs_f64(),
                exposed: stepped.exposed_comm.as_secs_f64(),
            });
            let last = self.window.is_none_or(|window| step >= window.last as u64);
            if last || step == self.plan.train.steps as u64 {
                self.write(rank)?;
            }
        }
        Ok(match self.merge.take_if(|merge| merge.is_finished()) {
            Some(merge) => finished(merge),
            None => None,
        })
    }

    /// Waits for the merge.
    pub fn finish(&mut self) -> Option<MergedTrace> {
        self.merge.take().and_then(finished)
    }

    fn write(&mut self, rank: &Rank<'_>) -> Result<(), Error> {
        let (group, tracer) = (self.group, self.group.tracer());
        tracer.switch(false);
        rank.device.meter().switch(false);
        let recorded = tracer.take();
        let after = ask_clock(group)?;
        let steps = std::mem::take(&mut self.steps);
        let (first, last) =
            (steps.first().map_or(0, |time| time.step), steps.last().map_or(0, |time| time.step));
        let trace = RankTrace {
            run: self.plan.name.clone(),
            rank: group.rank(),
            ranks: group.size(),
            host: host_name(),
            coord: coord(self.plan, group.rank()),
            steps,
            clock: ClockFit::of(&self.before, &after),
            blocks: rank.model.part.blocks.iter().map(|block| block.name.clone()).collect(),
            tags: Tag::ALL.iter().map(|tag| tag.name().to_string()).collect(),
            ..RankTrace::default()
        };
        let folder = trace_folder(self.folder, first, last);
        let written = trace.with(recorded).write(&folder);
        self.window = None;
        // A full disk must not stop the training.
        let error =
            written.err().map(|error| format!("cannot write {}: {error}", folder.display()));
        if let Some((rank, what)) = first_error(group, error)? {
            tracing::warn!("the timeline is incomplete: rank {rank}: {what}");
            return Ok(());
        }
        if group.rank() == 0 {
            self.finish();
            let merge = move || merge(&folder, first, last);
            self.merge = std::thread::Builder::new().name("timeline".into()).spawn(merge).ok();
        }
        Ok(())
    }
}

/// Merges the rank files of a timeline.
fn merge(folder: &Path, first: u64, last: u64) -> std::io::Result<MergedTrace> {
    let timeline = Timeline::read(folder)?;
    let path = merged_path(folder);
    write_chrome(&timeline, &path)?;
    Ok(MergedTrace { path, first, last, clock_error: timeline.alignment_error() })
}

fn finished(merge: JoinHandle<std::io::Result<MergedTrace>>) -> Option<MergedTrace> {
    match merge.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
        Ok(merged) => Some(merged),
        Err(error) => {
            tracing::warn!("cannot merge the timeline: {error}");
            None
        }
    }
}

/// Asks rank 0 for its time, several times. Rank 0 answers one rank after the other and needs no samples. Collective.
fn ask_clock(group: &Group) -> Result<Vec<ClockSample>, Error> {
    let now = || group.tracer().now().as_nanos() as i64;
    if group.rank() == 0 {
        for rank in 1..group.size() {
            for _ in 0..CLOCK_ROUNDS {
                group.receive(&mut [0i64], rank)?;
                group.send(&[now()], rank)?;
            }
        }
        return Ok(Vec::new());
    }
    let mut samples = Vec::with_capacity(CLOCK_ROUNDS);
    for _ in 0..CLOCK_ROUNDS {
        let asked = now();
        group.send(&[asked], 0)?;
        let mut reference = [0i64];
        group.receive(&mut reference, 0)?;
        samples.push(ClockSample {
            asked: asked as u64,
            answered: now() as u64,
            reference: reference[0] as u64,
        });
    }
    Ok(samples)
}

/// Position in the mesh, without axes of one rank.
fn coord(plan: &Plan, rank: usize) -> String {
    let (mesh, layout) = (plan.mesh(), &plan.layout);
    let at = mesh.coord(rank);
    let axes = [
        ("data", layout.data, at.data),
        ("tensor", layout.tensor, at.tensor),
        ("context", layout.context, at.context),
        ("pipe", layout.pipe, at.pipe),
    ];
    let words: Vec<String> = axes
        .into_iter()
        .filter(|(_, size, _)| *size > 1)
        .map(|(axis, _, index)| format!("{axis}={index}"))
        .collect();
    if words.is_empty() { "data=0".into() } else { words.join(" ") }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}
