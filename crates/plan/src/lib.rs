//! Pure values that describe a run: [`Config`] is what the user typed, [`Plan`] is what it means. Does no I/O,
//! reads no clock, starts no thread.
//!
//! ```
//! use lockstep_plan::{Config, Plan, Environment};
//!
//! let config = Config::parse("[model]\npreset = \"tiny\"", &["train.steps=200".into()]);
//! let plan = Plan::resolve(&config, &Environment::one_host(2, 8)).unwrap();
//! assert_eq!((plan.train.accumulation, plan.train.micro_batch, plan.layout.data), (2, 8, 2));
//!
//! let config = Config::parse("[model]\ndim = 128\nheads = 6", &[]);
//! let errors = Plan::resolve(&config, &Environment::one_host(1, 1).with_vocab(64)).unwrap_err();
//! assert_eq!(errors[0].to_string(), "model.heads (line 3): heads=6 does not divide dim=128; use 4 or 8");
//! ```

pub mod config;
pub mod context;
mod cut;
mod error;
mod layouts;
mod learning_rate;
mod ledger;
mod mesh;
pub mod model;
mod passes;
pub mod placement;
mod plan;
pub mod presets;
pub mod reduction;
mod refit;
mod resolve;
pub mod schedule;
mod traffic;

pub use config::{
    Compression, Config, Curve, DeviceKind, Fp8, Fp8Scaling, Offload, Recompute, TraceSteps,
};
pub use cut::cut;
pub use error::{ConfigError, Place};
pub use layouts::layouts;
pub use learning_rate::LearningRate;
pub use ledger::{Ledger, Offloaded, keeps_cheap};
pub use lockstep_types::{DeviceType, Dtype, SMALL_GEMM_ROWS};
pub use mesh::{Axis, Coord, GroupKind, Mesh};
pub use plan::{
    Checkpoint, Comm, Data, Device, Eval, Layout, Overlap, Plan, Precision, Sample, Source, Train,
};
pub use refit::refit;
pub use resolve::{DETERMINISTIC_UP_TO, Environment};
pub use traffic::{Collective, Phase, PlannedCall, traffic, traffic_of_step};
