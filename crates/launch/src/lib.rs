//! Starts ranks on this host, tells them who they are, and restarts them when some fail. Does not know what the ranks
//! compute.
//!
//! `lockstep-comm` defines what identifies a rank ([`lockstep_comm::Identity`]) and how processes of a job authenticate
//! each other ([`lockstep_comm::wire`]). This crate sits above it: it reads and writes identities as environment
//! variables ([`identity`]), runs the launcher of one host ([`launch`]), and joins the launchers of several hosts into
//! one elastic job ([`elastic`]). `lockstep-comm` does not depend on it.

pub mod elastic;
mod ending;
mod events;
mod generation;
pub mod identity;
mod lines;
mod meeting;
mod output;
mod rank;
mod slurm;
mod sources;
mod spec;
mod supervise;
mod sys;
mod vars;

pub use ending::{Ending, HOPELESS, STOPPED, signal_name};
pub use identity::{DEFAULT_PORT, IdentityError, LOG_DIR, SLOT};
pub use output::Show;
pub use slurm::SlurmNode;
pub use spec::{Failure, LaunchError, LaunchSpec, Outcome};
pub use supervise::{launch, respawn_self, this_program};
