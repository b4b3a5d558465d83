//! What a run reports: a step as a value, printed as the step line, kept in `metrics.jsonl` and in
//! TensorBoard files. Measures nothing itself, and draws no progress bar.

mod append;
mod metrics;
mod report;
mod tensorboard;
mod units;

pub use metrics::{Metrics, read};
pub use report::StepReport;
pub use tensorboard::TensorBoard;
pub use units::thousands;
