//! Reports of a run: a step as a value, printed as the step line and written to `metrics.jsonl` and TensorBoard files.
//! Measures nothing itself.

mod append;
mod metrics;
mod report;
mod tensorboard;
mod units;

pub use metrics::{Metrics, read};
pub use report::StepReport;
pub use tensorboard::TensorBoard;
pub use units::{duration, thousands};
