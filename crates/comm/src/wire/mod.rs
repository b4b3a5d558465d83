//! The authenticated connections between ranks: who may speak, and in what frames.
//! Never decides what is said on them, and never encrypts it.

mod entropy;
pub mod frame;
pub mod handshake;
pub mod message;
mod refusal;
mod secret;

pub use frame::{FrameError, FrameHeader, Kind, read_frame, write_frame};
pub use handshake::{Expect, accept, dial};
pub use message::{Hello, PROTOCOL, Purpose};
pub use refusal::HandshakeError;
pub use secret::{Secret, SecretError};
