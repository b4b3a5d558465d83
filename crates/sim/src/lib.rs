//! What a plan costs on a described cluster: memory, traffic and time of one optimizer step, before anything
//! runs. Runs no model, reads no clock; the story, the constants and their sources are in README.md.
//!
//! ```
//! use lockstep_plan::{Config, Plan, Surroundings};
//! use lockstep_sim::{Cluster, Options, estimate};
//!
//! let typed = "[model]\npreset = \"llama3-8b\"\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
//!              [layout]\ndata = 8\nzero = 3\n[precision]\ncompute = \"bf16\"";
//! let plan = Plan::resolve(&Config::parse(typed, &[]), &Surroundings::one_host(8, 1)).unwrap();
//! let cluster = Cluster::built_in("h100").unwrap();
//! let estimate = estimate(&plan, &cluster, &Options::default());
//! assert!(estimate.fits && estimate.mfu > 0.2 && estimate.mfu < 0.7);
//! ```

pub mod advice;
mod calibrate;
mod case;
pub mod clock;
mod cluster;
mod compute;
mod estimate;
mod exchange;
mod memory;
pub mod report;
pub mod search;
mod software;
mod step;

pub use calibrate::{Apart, Fitted, Multiply, Spent, calibrate, fit};
pub use cluster::{
    Accelerator, Cluster, Curve, Curves, Differs, Engine, Families, Link, Matmul, Paces, Part,
    Parts, Peak,
};
pub use compute::{ByKind, Kind, grouped, matmul};
pub use estimate::{Estimate, Options, Stage, Time, estimate};
pub use exchange::{Flow, Spread, seconds as collective_seconds, traffic};
pub use memory::{Memory, memories, states};
pub use software::{Kept, Selective, Software};
