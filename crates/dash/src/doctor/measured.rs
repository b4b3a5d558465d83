//! The times of a run, from its metrics and the times of its ranks.

use lockstep_events::{RankTimes, StepReport};
use lockstep_plan::Plan;
use serde::Serialize;

use super::latency::CallCost;
use crate::RunFolder;

/// Reports that count: the last ones, so that a run that changed is judged as it is now.
const REPORTS: usize = 20;

/// Times in seconds per step: medians over the last reports.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Measured {
    /// Number of reports behind the medians.
    pub reports: usize,
    pub step: f64,
    /// Standard deviation of the step time, relative to its mean.
    pub variation: f64,
    /// Compute time of each rank, with reading and waiting for a core.
    pub compute: Vec<f64>,
    /// Exposed communication of each rank, without the pipeline.
    pub wait: Vec<f64>,
    /// Waiting for messages of other pipeline stages.
    pub pipe: Vec<f64>,
    pub read: Vec<f64>,
    /// Waiting for a free core.
    pub queue: Vec<f64>,
    pub memory: Vec<u64>,
    /// Exposed communication of rank 0 by axis.
    pub exposed: Vec<(String, f64)>,
    /// Time that checkpoints block training, per step.
    pub checkpoint: f64,
    /// Bytes of a checkpoint, and seconds until it is written.
    pub save: Option<(f64, f64)>,
    /// Bytes that rank 0 sends per step.
    pub bytes_sent: u64,
    pub mfu: f64,
    /// Measured peak FLOP/s of a rank.
    pub peak_flops: f64,
    /// Highest load of an expert relative to the mean.
    pub expert_imbalance: Option<f64>,
    /// The fullest expert: its layer, its index and its load relative to the mean of the layer.
    pub fullest_expert: Option<(usize, usize, f64)>,
    /// The slow link that the ranks measured: its ends, its bytes/s, and what was expected.
    pub slow_link: Option<(usize, usize, f64, f64)>,
    /// Cost of a collective, if there is a timeline with calls of different sizes.
    pub call_cost: Option<CallCost>,
}

impl Measured {
    /// None before the first report after the warm-up.
    pub fn of(run: &RunFolder, plan: &Plan) -> Option<Measured> {
        let all: Vec<&StepReport> = run.steps().collect();
        // The first report includes the warm-up of pools and caches.
        let usable = all.get(1..).filter(|reports| !reports.is_empty())?;
        let last = &usable[usable.len().saturating_sub(REPORTS)..];
        let tokens = plan.tokens_per_step() as f64;
        let steps: Vec<f64> = last.iter().filter_map(|r| Some(tokens / r.tokens_per_s?)).collect();
        let step = median(steps.iter().copied());
        let first_step = last.first().map_or(0, |report| report.step);
        let ranks: Vec<&RankTimes> =
            run.ranks.iter().filter(|times| times.step >= first_step).collect();
        let of_rank = |of: fn(&RankTimes) -> &Vec<f32>| -> Vec<f64> {
            (0..plan.ranks)
                .map(|rank| {
                    let values = ranks.iter().filter_map(|times| of(times).get(rank));
                    median(values.map(|ms| f64::from(*ms) / 1e3))
                })
                .collect()
        };
        let more = |key: &'static str| {
            median(last.iter().filter_map(move |report| report.more.get(key)?.as_f64()))
        };
        let mut compute = of_rank(|times| &times.compute_ms);
        let (mut wait, pipe) = (of_rank(|times| &times.wait_ms), of_rank(|times| &times.pipe_ms));
        if ranks.is_empty() {
            // Runs of older versions have only the median and the maximum.
            compute = vec![more("compute_s"); plan.ranks];
            if let Some(slowest) = compute.last_mut().filter(|_| plan.ranks > 1) {
                *slowest = more("compute_s_most");
            }
            let exposed = median(last.iter().filter_map(|report| report.comm_exposed));
            wait = vec![exposed * step; plan.ranks];
        }
        wait.iter_mut().zip(&pipe).for_each(|(wait, pipe)| *wait = (*wait - pipe).max(0.0));
        let peak = median(last.iter().filter_map(|report| report.more.get("peak_flops")?.as_f64()));
        Some(Measured {
            reports: last.len(),
            step,
            variation: variation(&steps),
            compute,
            wait,
            pipe,
            read: of_rank(|times| &times.read_ms),
            queue: of_rank(|times| &times.queue_ms),
            memory: ranks.last().map_or(Vec::new(), |times| times.memory.clone()),
            exposed: exposed(last),
            checkpoint: checkpoint(run),
            save: save(run),
            bytes_sent: more("comm_bytes") as u64,
            mfu: median(last.iter().filter_map(|report| report.mfu)),
            peak_flops: peak,
            expert_imbalance: last.last().and_then(|report| report.expert_imbalance),
            fullest_expert: ranks.last().and_then(|times| fullest_expert(&times.experts)),
            slow_link: last.iter().rev().find_map(|report| slow_link(report)),
            call_cost: None,
        })
    }

    /// Other processes use the cores of the ranks: times say little about anything but the host.
    pub fn is_busy(&self) -> bool {
        median(self.queue.iter().copied()) > 0.2 * self.step
    }

    /// Rank that computes longest, and its time relative to the median of the others.
    pub fn slowest(&self) -> Option<(usize, f64)> {
        let (rank, most) =
            self.compute.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let others = self.compute.iter().enumerate().filter(|(other, _)| *other != rank);
        let typical = median(others.map(|(_, seconds)| *seconds));
        (typical > 0.0).then_some((rank, most / typical))
    }

    /// Communication that is not waiting for slower ranks: that of the rank that waits least.
    pub fn pure_comm(&self) -> f64 {
        let least = self.wait.iter().copied().fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 0.0 }
    }
}

fn exposed(last: &[&StepReport]) -> Vec<(String, f64)> {
    let axis = |axis: lockstep_types::trace::CommAxis| {
        let of = |report: &&StepReport| report.more.get("exposed_s")?.get(axis.name())?.as_f64();
        (axis.name().to_string(), median(last.iter().filter_map(of)))
    };
    let axes = lockstep_types::trace::CommAxis::ALL.into_iter().map(axis);
    axes.filter(|(_, seconds)| *seconds > 0.0).collect()
}

/// Stalls of all checkpoints over all steps since the start.
fn checkpoint(run: &RunFolder) -> f64 {
    let stall = |report: &StepReport| report.more.get("save_stall_s").and_then(|s| s.as_f64());
    let stalls: f64 = run.metrics.reports.iter().filter_map(stall).sum();
    let first = run.steps().next().map_or(0, |report| report.step.saturating_sub(1));
    let last = run.steps().next_back().map_or(0, |report| report.step);
    stalls / last.saturating_sub(first).max(1) as f64
}

/// Medians over all checkpoints.
fn save(run: &RunFolder) -> Option<(f64, f64)> {
    let of = |key: &'static str| {
        let values =
            run.metrics.reports.iter().filter_map(move |report| report.more.get(key)?.as_f64());
        median(values)
    };
    let (bytes, seconds) = (of("save_bytes"), of("save_s"));
    (bytes > 0.0).then_some((bytes, seconds))
}

fn fullest_expert(layers: &[Vec<f32>]) -> Option<(usize, usize, f64)> {
    let loads = layers.iter().enumerate().flat_map(|(layer, loads)| {
        loads.iter().enumerate().map(move |(expert, load)| (layer, expert, f64::from(*load)))
    });
    loads.max_by(|a, b| a.2.total_cmp(&b.2))
}

fn slow_link(report: &StepReport) -> Option<(usize, usize, f64, f64)> {
    let link = report.more.get("slow_link")?;
    let rank = |index: usize| Some(link.get("ranks")?.get(index)?.as_u64()? as usize);
    let rate = |key: &str| link.get(key)?.as_f64();
    Some((rank(0)?, rank(1)?, rate("bytes_per_s")?, rate("expected_bytes_per_s")?))
}

/// Median, or 0 without values.
pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

fn variation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let square = |value: &f64| (value - mean).powi(2);
    let variance = values.iter().map(square).sum::<f64>() / values.len().max(1) as f64;
    if mean > 0.0 { variance.sqrt() / mean } else { 0.0 }
}
