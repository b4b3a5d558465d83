//! The training loop: builds the state of a rank, takes optimizer steps, evaluates and saves checkpoints. Does not
//! print; callers receive [`Event`]s.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_data::{Options, Source};
//! use lockstep_kernels::Device;
//! use lockstep_plan::{Config, Plan, Environment};
//! use lockstep_trainer::Rank;
//!
//! let source = Source::open("builtin:grammar", &Options::default()).unwrap();
//! let config = Config::parse("[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 4\nlr = 1e-2", &[]);
//! let losses = |ranks| {
//!     let environment = Environment::one_host(ranks, 1).with_vocab(source.vocab());
//!     let plan = Plan::resolve(&config, &environment).unwrap();
//!     on_threads(ranks, |world| {
//!         let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
//!         [1, 2, 3].map(|step| rank.step(&source, step).unwrap().loss)
//!     })
//! };
//! // Both ranks report the same bits. A single rank computes the same loss up to rounding.
//! let (one, two) = (losses(1), losses(2));
//! assert_eq!(two[0], two[1]);
//! assert!((one[0][2] / two[0][2] - 1.0).abs() < 2e-5);
//! ```
//!
//! [`run()`] is the complete loop with evaluations, checkpoints and reports. [`Rank`] is the state of one rank and its
//! optimizer step, for custom loops.

mod agree;
mod consistency;
mod error;
mod evaluate;
mod expert_load;
mod final_save;
mod find_nan;
mod from_plan;
mod gather_texts;
mod in_flight;
pub mod links;
mod optimizer;
mod peak;
mod planned_traffic;
mod rank;
mod rank_zero;
mod replay;
mod replicas;
mod run;
mod run_queue;
mod saver;
mod skipped_samples;
mod snapshot;
mod start;
mod step_checksums;
pub mod straggler;
mod straggler_monitor;
mod text;
mod text_stream;
mod timeline;
mod verify;

pub use agree::{Flags, agree};
pub use consistency::{Setting, check_consistency, settings};
pub use error::Error;
pub use expert_load::ExpertLoad;
pub use from_plan::{device_options, dtype, train_sample};
pub use optimizer::Optimizer;
pub use peak::{PeakRate, measure_peak};
pub use planned_traffic::{PlannedTraffic, planned_call, planned_traffic};
pub use rank::{Rank, StepResult};
pub use rank_zero::on_rank_zero;
pub use replay::{Outcome, Replayed, replay};
pub use run::{Event, Finished, Run, failed_dir, run};
pub use saver::{FailedSave, SaveOutcome, SavedCheckpoint, Saver};
pub use snapshot::{HostTensors, Snapshot, load_whole};
pub use start::{Start, build};
pub use step_checksums::Divergence;
pub use straggler_monitor::{ReportTimes, Slow, StragglerMonitor};
pub use text::{Generator, Prompt, generate};
pub use timeline::MergedTrace;
pub use verify::{Difference, Tolerance, Trajectory, Trial, train, train_on_first_ranks};
