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

mod accord;
mod alike;
mod alone;
mod error;
mod evaluate;
mod find_nan;
mod left_out;
pub mod links;
mod lookout;
mod optimizer;
pub mod pace;
mod peak;
mod rank;
mod replay;
mod run;
mod saver;
mod spoken;
mod start;
mod stored;
mod text;
mod texts;
mod trace;
mod verify;

pub use accord::{Word, agree, first_trouble};
pub use alike::{Trait, check_alike, traits};
pub use alone::alone;
pub use error::Error;
pub use lookout::{Lookout, Slow, View};
pub use optimizer::Optimizer;
pub use peak::measure_peak;
pub use rank::{Rank, Stepped, dtype};
pub use replay::{Outcome, Replayed, replay};
pub use run::{Event, Finished, Run, failed, run};
pub use saver::{Ended, Saved, Saver};
pub use start::{Start, build};
pub use stored::{Snapshot, Whole, load_weights, load_whole};
pub use text::{Wanted, generate};
pub use trace::Parting;
pub use verify::{Course, Difference, Tolerance, course, course_among, course_on_threads};
