//! The JSON API. Every answer about a run takes its name as the parameter `run`.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use lockstep_events::trace::{TRACE_DIR, TRACE_REQUEST, Timeline, trace_folders};
use lockstep_plan::schedule::{Times, clock};
use lockstep_plan::{Ledger, Plan};
use lockstep_types::trace::SpanKind;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::broadcast::error::RecvError;

use super::state::Shared;
use super::traffic::bytes_between_ranks;
use crate::{RunFolder, doctor};

type App = State<Arc<Shared>>;

/// An answer, or a sentence about why there is none.
type Answer = Result<Json<Value>, Response>;

/// Points of a chart, if the page asks for no number.
const DEFAULT_POINTS: usize = 600;
const MOST_POINTS: usize = 5000;
/// Most ranks of the matrix of bytes.
const MOST_RANKS: usize = 64;
/// Lines of a log, if the page asks for no number.
const DEFAULT_LINES: usize = 200;
const MOST_LINES: usize = 5000;

#[derive(Deserialize)]
pub(super) struct RunQuery {
    run: String,
}

#[derive(Deserialize)]
pub(super) struct MetricsQuery {
    run: String,
    from: Option<f64>,
    to: Option<f64>,
    points: Option<usize>,
}

#[derive(Deserialize)]
pub(super) struct LogQuery {
    run: String,
    rank: Option<usize>,
    search: Option<String>,
    lines: Option<usize>,
}

#[derive(Deserialize)]
pub(super) struct TraceQuery {
    run: String,
    steps: Option<u64>,
}

fn problem(status: StatusCode, text: impl Into<String>) -> Response {
    (status, Json(json!({ "error": text.into() }))).into_response()
}

fn folder(shared: &Shared, run: &str) -> Result<PathBuf, Response> {
    shared
        .path(run)
        .ok_or_else(|| problem(StatusCode::NOT_FOUND, format!("there is no run {run:?}")))
}

/// Reads a run, with the end of its metrics, on a thread that may block.
async fn read<R: Send + 'static>(
    path: PathBuf,
    work: impl FnOnce(&RunFolder) -> R + Send + 'static,
) -> Result<R, Response> {
    read_with(RunFolder::open_end, path, work).await
}

async fn read_with<R: Send + 'static>(
    open: fn(&Path) -> io::Result<RunFolder>,
    path: PathBuf,
    work: impl FnOnce(&RunFolder) -> R + Send + 'static,
) -> Result<R, Response> {
    let opened = move || open(&path).map(|run| work(&run));
    match tokio::task::spawn_blocking(opened).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(problem(StatusCode::NOT_FOUND, error.to_string())),
        Err(_) => Err(problem(StatusCode::INTERNAL_SERVER_ERROR, "the run could not be read")),
    }
}

pub(super) async fn runs(State(shared): App) -> Json<Value> {
    Json(Value::Array(shared.list()))
}

/// State, mesh, times of the ranks, checkpoints and memory.
pub(super) async fn run(State(shared): App, Query(query): Query<RunQuery>) -> Answer {
    let path = folder(&shared, &query.run)?;
    let name = query.run;
    let answer = read(path, move |run| {
        let (step, steps) = run.progress();
        let last = run.ranks.last();
        json!({
            "name": name,
            "state": run.state,
            "step": step,
            "steps": steps,
            "generation": run.generation,
            "failures": run.failures,
            "checkpoints": run.checkpoints,
            "mesh": run.plan.as_ref().map(mesh),
            "times": last,
            "device": run.plan.as_ref().map(|plan| plan.device),
            "comm_bytes": run.steps().next_back().and_then(|report| report.more.get("comm_bytes")),
            "memory": run.plan.as_ref().map(|plan| memory(plan, last.map(|times| &times.memory[..]))),
            "memory_by_tag": run.steps().next_back().and_then(|report| report.more.get("memory_by_tag")),
            "timelines": trace_folders(&run.path).iter().filter_map(|path| {
                path.file_name().map(|name| name.to_string_lossy().into_owned())
            }).collect::<Vec<_>>(),
        })
    });
    answer.await.map(Json)
}

/// Ranks with their positions, and the bytes that each sends to each other one per step.
fn mesh(plan: &Plan) -> Value {
    let mesh = plan.mesh();
    let rank = |rank: usize| {
        let at = mesh.coord(rank);
        json!({ "rank": rank, "data": at.data, "tensor": at.tensor, "context": at.context, "pipe": at.pipe })
    };
    let layout = &plan.layout;
    json!({
        "axes": { "data": layout.data, "tensor": layout.tensor, "context": layout.context, "pipe": layout.pipe },
        "ranks": (0..plan.ranks).map(rank).collect::<Vec<_>>(),
        "traffic": (plan.ranks <= MOST_RANKS).then(|| bytes_between_ranks(plan)),
    })
}

/// Planned memory by line, and the measured peak of each rank.
fn memory(plan: &Plan, measured: Option<&[u64]>) -> Value {
    let ledger = Ledger::largest(plan);
    json!({
        "planned": {
            "parameters": ledger.parameters, "gradients": ledger.gradients, "optimizer": ledger.optimizer,
            "activations": ledger.activations, "gathered": ledger.gathered,
            "compression": ledger.compressor_state, "snapshot": ledger.snapshot,
            "offloaded": ledger.offloaded.total(),
        },
        "planned_total": ledger.total(),
        "measured": measured,
    })
}

pub(super) async fn metrics(State(shared): App, Query(query): Query<MetricsQuery>) -> Answer {
    let points = query.points.unwrap_or(DEFAULT_POINTS).min(MOST_POINTS);
    let (from, to) = (query.from.unwrap_or(0.0), query.to.unwrap_or(f64::INFINITY));
    let found = shared.series(&query.run, |series, state| {
        let mut answer = json!(series.points(from, to, points));
        answer["state"] = json!(state);
        answer["steps"] = json!(series.steps);
        answer
    });
    found
        .map(Json)
        .ok_or_else(|| problem(StatusCode::NOT_FOUND, format!("there is no run {:?}", query.run)))
}

/// The last lines of the logs, first failing rank first.
pub(super) async fn logs(State(shared): App, Query(query): Query<LogQuery>) -> Answer {
    let path = folder(&shared, &query.run)?;
    let lines = query.lines.unwrap_or(DEFAULT_LINES).min(MOST_LINES);
    let answer = read(path, move |run| {
        let first = run.failures.last().map(|failure| failure.rank);
        let mut logs = run.logs();
        logs.sort_by_key(|log| (Some(log.rank) != first, log.rank));
        let ranks: Vec<usize> = logs.iter().map(|log| log.rank).collect();
        let chosen = query.rank.or(ranks.first().copied());
        let search = query.search.as_deref().unwrap_or("");
        let log = logs.iter().find(|log| Some(log.rank) == chosen);
        let text = log.and_then(|log| log.tail(lines, search).ok()).unwrap_or_default();
        let text: Vec<String> = text.into_iter().map(|line| line.text).collect();
        json!({ "ranks": ranks, "first_failing": first, "rank": chosen, "lines": text })
    });
    answer.await.map(Json)
}

pub(super) async fn plan(State(shared): App, Query(query): Query<RunQuery>) -> Answer {
    let path = folder(&shared, &query.run)?;
    let answer = read(path, |run| {
        let report = doctor::plan_report(run, None);
        run.plan.as_ref().map_or(Value::Null, |plan| json!({ "plan": plan, "report": report }))
    });
    answer.await.map(Json)
}

pub(super) async fn doctor(State(shared): App, Query(query): Query<RunQuery>) -> Answer {
    let path = folder(&shared, &query.run)?;
    // Checkpoints of the whole run count.
    let diagnosis = read_with(RunFolder::open, path, |run| {
        let diagnosis = doctor::diagnose(run, None);
        let text = diagnosis.to_string();
        let mut value = json!(diagnosis);
        value["text"] = text.into();
        value
    });
    diagnosis.await.map(Json)
}

/// The passes of one step of the last timeline, executed and planned.
pub(super) async fn timeline(State(shared): App, Query(query): Query<RunQuery>) -> Answer {
    let path = folder(&shared, &query.run)?;
    let answer = read(path, |run| {
        let Some(folder) = trace_folders(&run.path).pop() else { return Value::Null };
        Timeline::read(&folder).map_or(Value::Null, |timeline| {
            json!({
                "name": folder.file_name().map(|name| name.to_string_lossy().into_owned()),
                "clock_error_s": timeline.alignment_error(),
                "executed": executed(&timeline),
                "planned": run.plan.as_ref().map(planned),
                "breakdown": timeline.breakdowns(),
                "text": lockstep_events::trace::report(&timeline),
            })
        })
    });
    answer.await.map(Json)
}

/// Spans of the last traced step on the training threads: rank, kind, name, micro-batch, start and end in milliseconds.
fn executed(timeline: &Timeline) -> Value {
    let Some((_, step)) = timeline.steps() else { return Value::Null };
    let begin = timeline.ranks.iter().filter_map(|rank| Some(rank.step_span(step)?.start)).min();
    let begin = begin.unwrap_or(0);
    let shown = [SpanKind::Pass, SpanKind::Exposed, SpanKind::Optimizer, SpanKind::Data];
    let ms = |nanos: u64| nanos.saturating_sub(begin) as f64 / 1e6;
    let ranks: Vec<Value> = timeline
        .ranks
        .iter()
        .map(|rank| {
            let span = rank.step_span(step);
            let (from, to) = span.map_or((0, 0), |span| (span.start, span.end()));
            let main = rank.main_thread();
            let inside = rank.spans.iter().filter(|span| {
                Some(span.thread) == main
                    && shown.contains(&span.kind)
                    && from <= span.start
                    && span.end() <= to
            });
            let spans: Vec<Value> = inside
                .map(|span| {
                    json!([span.kind.name(), span.name, span.micro, ms(span.start), ms(span.end())])
                })
                .collect();
            json!({ "rank": rank.rank, "coord": rank.coord, "spans": spans })
        })
        .collect();
    json!({ "step": step, "ranks": ranks })
}

/// The planned schedule, with backward passes that take twice as long as forward passes: for each pipeline rank, its
/// actions with start and end.
fn planned(plan: &Plan) -> Value {
    let times = Times { forward: 1.0, input: 1.0, weights: 1.0, send: 0.0 };
    let Ok(timeline) = clock(&plan.schedule(), &times) else { return Value::Null };
    let span = |span: &lockstep_plan::schedule::Span| {
        let action = span.action;
        let act = format!("{:?}", action.act).to_lowercase();
        json!([act, action.stage, action.micro, span.start, span.end])
    };
    let ranks = timeline.ranks.iter().map(|rank| rank.iter().map(span).collect::<Vec<_>>());
    json!(ranks.collect::<Vec<_>>())
}

/// Asks a running job for a timeline. The header keeps pages of other sites from doing so.
pub(super) async fn request_trace(
    State(shared): App,
    headers: HeaderMap,
    Query(query): Query<TraceQuery>,
) -> Answer {
    if !headers.contains_key("x-lockstep") {
        return Err(problem(StatusCode::FORBIDDEN, "the header x-lockstep is missing"));
    }
    let folder = folder(&shared, &query.run)?.join(TRACE_DIR);
    let steps = query.steps.unwrap_or(3).clamp(1, 1000);
    write_request(&folder, steps)
        .map_err(|error| problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    Ok(Json(json!({ "requested": steps })))
}

fn write_request(folder: &Path, steps: u64) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join(TRACE_REQUEST), steps.to_string())
}

/// Changes of all runs as server-sent events.
pub(super) async fn events(
    State(shared): App,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let changes = shared.changes.subscribe();
    let stream = unfold(changes, |mut changes| async move {
        loop {
            match changes.recv().await {
                Ok(message) => return Some((Ok(Event::default().data(message)), changes)),
                // A slow page misses messages and reads the newest state with the next one.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}
