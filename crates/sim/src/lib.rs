//! Predicts memory, traffic and time of one optimizer step of a plan on a described cluster. Runs no model and reads
//! no clock. README.md explains the model, its constants and their sources.
//!
//! ```
//! use lockstep_plan::{Config, Plan, Environment};
//! use lockstep_sim::{Cluster, Options, estimate};
//!
//! let text = "[model]\npreset = \"llama3-8b\"\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
//!              [layout]\ndata = 8\nzero = 3\n[precision]\ncompute = \"bf16\"";
//! let plan = Plan::resolve(&Config::parse(text, &[]), &Environment::one_host(8, 1)).unwrap();
//! let cluster = Cluster::built_in("h100").unwrap();
//! let estimate = estimate(&plan, &cluster, &Options::default());
//! assert!(estimate.fits && estimate.mfu > 0.2 && estimate.mfu < 0.7);
//! ```

pub mod advice;
mod calibrate;
mod case;
pub mod clock;
mod cluster;
mod comm;
mod compute;
mod estimate;
mod memory;
pub mod report;
pub mod search;
mod software;
mod step;

pub use calibrate::{
    Fitted, GpuMeasurement, MeasuredAttention, MeasuredMatmul, MeasuredStep, RankSkew, calibrate,
    fit, fit_gpu,
};
pub use cluster::{
    Accelerator, AttentionRate, AttentionRates, Cluster, Curve, Deviation, Efficiency, Engine,
    FamilyCurves, Link, Matmul, MatmulOverhead, MatmulOverheads, OpCurves, Peak,
};
pub use comm::{Flow, GroupPlacement, seconds as collective_seconds, traffic};
pub use compute::{ByClass, MatmulCall, OpClass, grouped, matmul};
pub use estimate::{Estimate, Options, Stage, Time, estimate};
pub use memory::{MemoryEstimate, memories, states};
pub use software::{SavedActivations, Selective, Software};
