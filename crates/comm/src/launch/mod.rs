//! Starting ranks and telling them who they are. Never moves a byte between ranks: it ends where
//! each process knows its rank and where to meet the others.

pub(crate) mod ending;
pub(crate) mod events;
pub(crate) mod generation;
mod identity;
mod lines;
pub(crate) mod meeting;
pub(crate) mod output;
mod rank;
mod slurm;
mod sources;
mod spec;
mod supervise;
mod sys;
pub mod token;
mod vars;

pub use ending::{Ending, HOPELESS, STOPPED, signal_name};
pub use identity::{DEFAULT_PORT, Identity, IdentityError, LOG_DIR, SLOT, VARIABLES};
pub use output::Show;
pub use slurm::SlurmNode;
pub use sources::Source;
pub use spec::{Failure, LaunchError, LaunchSpec, Outcome};
pub use supervise::{launch, respawn_self, this_program};
pub use sys::inherited_listener;
pub use token::{TokenError, TokenSource};
