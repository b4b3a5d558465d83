//! Starts ranks on this host, tells them who they are, and restarts them when some fail. Does not know what the ranks
//! compute.
//!
//! `lockstep-comm` defines what identifies a rank ([`lockstep_comm::Identity`]) and how processes of a job authenticate
//! each other ([`lockstep_comm::wire`]). This crate sits above it: it reads and writes identities as environment
//! variables ([`identity`]), runs the launcher of one host ([`launch`]), and joins the launchers of several hosts into
//! one elastic job ([`elastic`]). `lockstep-comm` does not depend on it.

mod detect;
pub mod elastic;
mod events;
mod exit;
mod exit_watch;
mod failure_log;
mod generation;
pub mod identity;
mod lines;
mod output;
mod rank;
mod rendezvous;
pub mod selftest;
mod slurm;
mod spec;
mod stopped;
mod supervise;
mod sys;
pub mod topology;
mod vars;

pub use exit::{EXIT_DEVICE_LOST, EXIT_PERMANENT, EXIT_STOPPED, Exit};
pub use failure_log::FAILURES;
pub use identity::{DEFAULT_PORT, IdentityError, LOG_DIR};
pub use output::OutputMode;
pub use slurm::SlurmNode;
pub use spec::{Failure, LaunchError, LaunchSpec, Outcome};
pub use supervise::{launch, this_program};
