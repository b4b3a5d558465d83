//! The metrics of a run in columns, read while the file grows, and downsampled for charts. A line needs 200 bytes, so that
//! a run of 100,000 reports fits in 20 MB.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize, Serializer};

/// Columns of a training report, in the order of [`Row::values`].
pub(super) const COLUMNS: [&str; 21] = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu",
    "comm_exposed",
    "mem_bytes",
    "mem_planned_bytes",
    "tokens",
    "elapsed_s",
    "compute_s",
    "compute_s_most",
    "read_s",
    "queue_s",
    "expert_imbalance",
    "exposed_data",
    "exposed_tensor",
    "exposed_context",
    "exposed_expert",
    "exposed_pipe",
];

/// Metrics of one run.
#[derive(Debug, Default)]
pub struct Series {
    path: PathBuf,
    offset: u64,
    /// One column per name.
    pub columns: Vec<Vec<f64>>,
    /// Step and loss of evaluations.
    pub evals: Vec<(f64, f64)>,
    /// Step, seconds and stall of checkpoints.
    pub saves: Vec<(f64, f64, f64)>,
    pub steps: usize,
    pub damaged: usize,
}

/// Values of a metrics line that are charted.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Row {
    step: f64,
    steps: usize,
    loss: Option<f64>,
    eval_loss: Option<f64>,
    grad_norm: Option<f64>,
    lr: Option<f64>,
    tokens_per_s: Option<f64>,
    mfu: Option<f64>,
    comm_exposed: Option<f64>,
    mem_bytes: Option<f64>,
    mem_planned_bytes: Option<f64>,
    tokens: Option<f64>,
    elapsed_s: Option<f64>,
    compute_s: Option<f64>,
    compute_s_most: Option<f64>,
    read_s: Option<f64>,
    queue_s: Option<f64>,
    expert_imbalance: Option<f64>,
    exposed_s: Exposed,
    saved_step: Option<f64>,
    save_s: Option<f64>,
    save_stall_s: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Exposed {
    data: f64,
    tensor: f64,
    context: f64,
    expert: f64,
    pipe: f64,
}

impl Row {
    fn values(&self) -> [f64; COLUMNS.len()] {
        let or_nan = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let exposed = &self.exposed_s;
        [
            self.step,
            or_nan(self.loss),
            or_nan(self.grad_norm),
            or_nan(self.lr),
            or_nan(self.tokens_per_s),
            or_nan(self.mfu),
            or_nan(self.comm_exposed),
            or_nan(self.mem_bytes),
            or_nan(self.mem_planned_bytes),
            or_nan(self.tokens),
            or_nan(self.elapsed_s),
            or_nan(self.compute_s),
            or_nan(self.compute_s_most),
            or_nan(self.read_s),
            or_nan(self.queue_s),
            or_nan(self.expert_imbalance),
            exposed.data,
            exposed.tensor,
            exposed.context,
            exposed.expert,
            exposed.pipe,
        ]
    }
}

impl Series {
    pub fn new(path: &Path) -> Series {
        let columns = vec![Vec::new(); COLUMNS.len()];
        Series { path: path.to_path_buf(), columns, ..Series::default() }
    }

    /// Number of training reports.
    pub fn len(&self) -> usize {
        self.columns[0].len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The last value of a column.
    pub fn last(&self, name: &str) -> Option<f64> {
        let column = COLUMNS.iter().position(|column| *column == name)?;
        self.columns[column].last().copied().filter(|value| value.is_finite())
    }

    /// Reads what was appended since the last call; returns whether anything changed.
    pub fn update(&mut self) -> io::Result<bool> {
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            opened => opened?,
        };
        let len = file.metadata()?.len();
        if len < self.offset {
            // The run resumed from an earlier step, and the file was replaced.
            *self = Series::new(&self.path);
        }
        if len == self.offset {
            return Ok(false);
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines = bytes[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.for_each(|line| self.add(line));
        self.offset += whole as u64;
        Ok(whole > 0)
    }

    fn add(&mut self, line: &[u8]) {
        let Ok(row) = serde_json::from_slice::<Row>(line) else {
            self.damaged += 1;
            return;
        };
        self.steps = row.steps;
        if let Some(loss) = row.eval_loss {
            self.evals.push((row.step, loss));
        }
        if let (Some(step), Some(seconds)) = (row.saved_step, row.save_s) {
            self.saves.push((step, seconds, row.save_stall_s.unwrap_or(0.0)));
        }
        if row.tokens_per_s.is_some() {
            self.columns
                .iter_mut()
                .zip(row.values())
                .for_each(|(column, value)| column.push(value));
        }
    }

    /// At most about `most` reports between two steps: in each interval those with the lowest and the highest loss, so
    /// that spikes stay visible.
    pub fn points(&self, from: f64, to: f64, most: usize) -> Points {
        let steps = &self.columns[0];
        let start = steps.partition_point(|step| *step < from);
        let end = steps.partition_point(|step| *step <= to).max(start);
        let indices = pick(&self.columns[1][start..end], most.max(4), start);
        let columns = COLUMNS.iter().zip(&self.columns);
        let column = |(name, values): (&&'static str, &Vec<f64>)| {
            (*name, indices.iter().map(|index| Number(values[*index])).collect())
        };
        let inside = |step: &f64| (from..=to).contains(step);
        let evals = self.evals.iter().filter(|eval| inside(&eval.0));
        Points {
            total: end - start,
            train: columns.map(column).collect(),
            evals: evals.map(|(step, loss)| (*step, Number(*loss))).collect(),
            saves: self.saves.iter().copied().filter(|save| inside(&save.0)).collect(),
        }
    }
}

/// Indices to keep: all if there are few.
fn pick(losses: &[f64], most: usize, offset: usize) -> Vec<usize> {
    if losses.len() <= most {
        return (offset..offset + losses.len()).collect();
    }
    let buckets = most / 2;
    let mut kept = Vec::with_capacity(most + 2);
    for bucket in 0..buckets {
        let (from, to) = (bucket * losses.len() / buckets, (bucket + 1) * losses.len() / buckets);
        let order = |a: &usize, b: &usize| losses[*a].total_cmp(&losses[*b]);
        let (least, largest) = ((from..to).min_by(order), (from..to).max_by(order));
        let (Some(least), Some(largest)) = (least, largest) else { continue };
        kept.push(least.min(largest));
        if least != largest {
            kept.push(least.max(largest));
        }
    }
    // The newest report is always shown.
    if kept.last() != Some(&(losses.len() - 1)) {
        kept.push(losses.len() - 1);
    }
    kept.into_iter().map(|index| index + offset).collect()
}

/// Downsampled metrics.
#[derive(Serialize)]
pub struct Points {
    /// Reports before downsampling.
    pub total: usize,
    pub train: std::collections::BTreeMap<&'static str, Vec<Number>>,
    pub evals: Vec<(f64, Number)>,
    pub saves: Vec<(f64, f64, f64)>,
}

/// A number that is null if it is not finite.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Number(pub f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.is_finite() {
            true => serializer.serialize_f64(self.0),
            false => serializer.serialize_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_and_the_last_report_survive_downsampling() {
        let mut losses: Vec<f64> = (0..10_000).map(|step| 5.0 - f64::from(step) / 1e4).collect();
        losses[7_777] = 50.0;
        let kept = pick(&losses, 100, 0);
        assert!(kept.len() <= 102 && kept.contains(&7_777) && kept.contains(&9_999), "{kept:?}");
        assert!(kept.is_sorted());
        assert_eq!(pick(&losses[..3], 100, 5), [5, 6, 7]);
    }
}
