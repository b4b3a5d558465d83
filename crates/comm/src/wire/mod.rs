//! Authenticated connections between ranks, and frames. Does not define the content of frames and does not
//! encrypt it; see README.md.

mod connect;
mod deadline;
mod entropy;
pub mod frame;
pub mod handshake;
mod handshake_error;
mod listener;
pub mod message;
mod pending;
mod secret;
mod socks5;
mod throttle;

pub use connect::{AttemptError, ConnectError, Route, connect, connect_while};
pub use frame::{FrameError, FrameHeader, FrameKind, read_frame, write_frame};
pub use handshake::{Expect, accept, dial};
pub use handshake_error::HandshakeError;
pub use listener::{Limits, ListenError, Listener, ListenerHandle};
pub use message::{Hello, PROTOCOL, Purpose};
pub use secret::{Secret, SecretError};
