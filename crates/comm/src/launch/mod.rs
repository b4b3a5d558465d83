//! Starting ranks and telling them who they are. Never moves a byte between ranks: it ends where
//! each process knows its rank and where to meet the others.

mod identity;
mod slurm;
mod sources;
pub mod token;
mod vars;

pub use identity::{DEFAULT_PORT, Identity, IdentityError, VARIABLES};
pub use sources::Source;
pub use token::{TokenError, TokenSource};
