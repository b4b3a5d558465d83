//! Reads run folders: what a run did ([`RunFolder`]), what limits it and what to do about it ([`doctor`]), and a web page
//! over many runs (`serve`). Works on files only: it neither links the trainer nor changes a run.
//!
//! ```no_run
//! use lockstep_dash::{RunFolder, doctor};
//! let run = RunFolder::open("runs/songs".as_ref()).unwrap();
//! let diagnosis = doctor::diagnose(&run, None);
//! println!("{}", diagnosis.verdict);
//! ```

pub mod doctor;
mod flight;
mod logs;
mod metrics;
mod run;
#[cfg(feature = "serve")]
pub mod serve;

pub use flight::{FailureRecord, FlightOperation, FlightRecord, REPLAYS, ReplayRecord};
pub use logs::{LogLine, RankLog};
pub use metrics::MetricsReader;
pub use run::{CheckpointInfo, RunFolder, RunState, list_runs};
