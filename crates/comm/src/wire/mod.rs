//! The authenticated connections between ranks: who may speak, and in what frames.
//! Never decides what is said on them, and never encrypts it; see the README beside this file.

mod connect;
mod deadline;
mod entropy;
pub mod frame;
pub mod handshake;
mod listener;
pub mod message;
mod pending;
mod refusal;
mod secret;

pub use connect::{Cause, ConnectError, connect};
pub use frame::{FrameError, FrameHeader, Kind, read_frame, write_frame};
pub use handshake::{Expect, accept, dial};
pub use listener::{Limits, ListenError, Listener, ListenerHandle};
pub use message::{Hello, PROTOCOL, Purpose};
pub use refusal::HandshakeError;
pub use secret::{Secret, SecretError};
