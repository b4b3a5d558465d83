//! The runs that are served, kept up to date by one thread that looks at the files. Subscribers hear about changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::broadcast;

use super::series::{COLUMNS, Number, Series};
use crate::run::{Progress, state_of};
use crate::{RunState, list_runs};

/// Time between two looks at the files.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// Looks between two checks of the state of runs that do not change.
const STATE_EVERY: u32 = 10;
/// Points of a sparkline.
const SPARKLINE: usize = 40;

pub(super) struct Shared {
    roots: Vec<PathBuf>,
    runs: Mutex<BTreeMap<String, Entry>>,
    /// Messages for the pages: a run, its step and its state.
    pub changes: broadcast::Sender<String>,
}

struct Entry {
    path: PathBuf,
    series: Series,
    state: RunState,
}

impl Shared {
    /// Reads all runs once and starts the thread.
    pub fn start(roots: Vec<PathBuf>) -> Arc<Shared> {
        let (changes, _) = broadcast::channel(256);
        let shared = Arc::new(Shared { roots, runs: Mutex::default(), changes });
        shared.look(true);
        let weak = Arc::downgrade(&shared);
        let look = move || {
            for round in 0u32.. {
                std::thread::sleep(LOOK_EVERY);
                let Some(shared) = weak.upgrade() else { return };
                shared.look(round.is_multiple_of(STATE_EVERY));
            }
        };
        // Without the thread the page still shows what was read at the start.
        let _ = std::thread::Builder::new().name("dash".into()).spawn(look);
        shared
    }

    /// Folders of all runs by name. A name that occurs twice gets a number.
    fn folders(&self) -> BTreeMap<String, PathBuf> {
        let mut found = BTreeMap::new();
        for root in &self.roots {
            let runs = match root.join("plan.json").exists() || root.join("metrics.jsonl").exists()
            {
                true => vec![root.clone()],
                false => list_runs(root),
            };
            for path in runs {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let free = |name: &String| !found.contains_key(name);
                let unique = std::iter::once(name.clone())
                    .chain((2..).map(|number| format!("{name} ({number})")))
                    .find(free);
                found.insert(unique.unwrap_or(name), path);
            }
        }
        found
    }

    fn look(&self, all_states: bool) {
        let folders = self.folders();
        let mut runs = self.runs();
        let gone: Vec<String> =
            runs.keys().filter(|name| !folders.contains_key(*name)).cloned().collect();
        for name in gone {
            runs.remove(&name);
            let _ = self.changes.send(json!({ "run": name, "gone": true }).to_string());
        }
        for (name, path) in folders {
            let entry = runs.entry(name.clone()).or_insert_with(|| Entry {
                series: Series::new(&path.join("metrics.jsonl")),
                path: path.clone(),
                state: RunState::Starting,
            });
            let changed = entry.series.update().unwrap_or(false);
            if !changed && !all_states {
                continue;
            }
            let state = find_state(&path, &entry.series);
            let moved = std::mem::replace(&mut entry.state, state) != state;
            if changed || moved {
                let step = entry.series.last("step").unwrap_or(0.0);
                let message = json!({ "run": name, "step": step, "state": state });
                // Nobody listens while no page is open.
                let _ = self.changes.send(message.to_string());
            }
        }
    }

    fn runs(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.runs.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The folder of a run. Only listed runs have one, so a name cannot lead elsewhere.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.runs().get(name).map(|entry| entry.path.clone())
    }

    /// Calls `with` with the metrics of a run.
    pub fn series<R>(&self, name: &str, with: impl FnOnce(&Series, RunState) -> R) -> Option<R> {
        self.runs().get(name).map(|entry| with(&entry.series, entry.state))
    }

    /// The names of all runs.
    pub fn names(&self) -> Vec<String> {
        self.runs().keys().cloned().collect()
    }

    /// State, progress and sparkline of all runs.
    pub fn list(&self) -> Vec<Value> {
        let run = |(name, entry): (&String, &Entry)| {
            let series = &entry.series;
            let points = series.points(0.0, f64::INFINITY, SPARKLINE);
            let number = |key| series.last(key).map(Number);
            json!({
                "name": name,
                "state": entry.state,
                "step": number("step"),
                "steps": series.steps,
                "loss": number("loss"),
                "eval_loss": series.evals.last().map(|eval| Number(eval.1)),
                "tokens_per_s": number("tokens_per_s"),
                "elapsed_s": number("elapsed_s"),
                "sparkline": points.train["loss"],
                "damaged": series.damaged,
            })
        };
        self.runs().iter().map(run).collect()
    }
}

/// The state of a run.
fn find_state(path: &Path, series: &Series) -> RunState {
    let elapsed = COLUMNS.iter().position(|column| *column == "elapsed_s");
    let interval = match elapsed.map(|column| &series.columns[column][..]) {
        Some([.., before, last]) => last - before,
        _ => 0.0,
    };
    let step = series.last("step").unwrap_or(0.0) as usize;
    state_of(path, &Progress { step, steps: series.steps, interval })
}
