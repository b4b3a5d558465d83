//! Reports of a run: a step as a value, printed as the step line and written to `metrics.jsonl` and TensorBoard files;
//! the times of all ranks; and timelines of single steps.
//! Measures nothing itself.

mod append;
mod metrics;
mod rank_times;
mod report;
mod tensorboard;
pub mod trace;
mod units;

pub use metrics::{Metrics, read};
pub use rank_times::{RankTimes, RankTimesFile, read_last_rank_times, read_rank_times};
pub use report::StepReport;
pub use tensorboard::TensorBoard;
pub use units::{MemoryUnit, duration, thousands};
