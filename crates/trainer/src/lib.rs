//! Builds a rank's share of a run, does optimizer steps, and loops until the run is done. Knows nothing of
//! the command line: whoever runs it is told what happens.
//!
//! ```
//! use lockstep_comm::on_threads;
//! use lockstep_data::{Options, Source};
//! use lockstep_kernels::Device;
//! use lockstep_plan::{Config, Plan, Environment};
//! use lockstep_trainer::Rank;
//!
//! let source = Source::open("builtin:grammar", &Options::default()).unwrap();
//! let typed = Config::parse("[model]\npreset = \"gpt2-test\"\n[train]\nglobal_batch = 4\nlr = 1e-2", &[]);
//! let losses = |ranks| {
//!     let around = Environment::one_host(ranks, 1).with_vocab(source.vocab());
//!     let plan = Plan::resolve(&typed, &around).unwrap();
//!     on_threads(ranks, |world| {
//!         let mut rank = Rank::new(&plan, &world, Device::cpu(1)).unwrap();
//!         [1, 2, 3].map(|step| rank.step(&source, step).unwrap().loss)
//!     })
//! };
//! // Two ranks know the same global loss, to the bit; and one rank comes to it as well, up to rounding.
//! let (one, two) = (losses(1), losses(2));
//! assert_eq!(two[0], two[1]);
//! assert!((one[0][2] / two[0][2] - 1.0).abs() < 2e-5);
//! ```
//!
//! [`run()`] is the whole loop with its evaluations, checkpoints and reports; [`Rank`] is one rank's state and
//! its steps, for loops of one's own.

mod agree;
mod consistency;
mod error;
mod evaluate;
mod find_nan;
mod gather_texts;
pub mod links;
mod optimizer;
mod peak;
mod rank;
mod rank_zero;
mod replay;
mod run;
mod saver;
mod skipped_samples;
mod snapshot;
mod start;
mod step_checksums;
pub mod straggler;
mod straggler_monitor;
mod text;
mod text_stream;
mod verify;

pub use agree::{Flags, agree, first_error};
pub use consistency::{Setting, check_consistency, settings};
pub use error::Error;
pub use optimizer::Optimizer;
pub use peak::measure_peak;
pub use rank::{Rank, StepResult, dtype};
pub use rank_zero::on_rank_zero;
pub use replay::{Outcome, Replayed, replay};
pub use run::{Event, Finished, Run, failed, run};
pub use saver::{SaveOutcome, SavedCheckpoint, Saver};
pub use snapshot::{Snapshot, Whole, load_weights, load_whole};
pub use start::{Start, build};
pub use step_checksums::Divergence;
pub use straggler_monitor::{ReportTimes, Slow, StragglerMonitor};
pub use text::{Prompt, generate};
pub use verify::{
    Difference, Tolerance, Trajectory, Trial, train, train_on_first_ranks, train_on_threads,
};
