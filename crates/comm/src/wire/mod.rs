//! Authenticated and optionally encrypted connections between ranks, and frames. Does not define the content of
//! frames; see README.md.

pub(crate) mod checksum;
mod connect;
pub(crate) mod crc32c;
mod deadline;
mod entropy;
pub mod frame;
pub mod handshake;
mod handshake_error;
mod listener;
pub mod message;
mod pending;
mod seal;
mod secret;
mod socks5;
mod stream;
mod throttle;

pub use connect::{AttemptError, ConnectError, Route, connect, connect_while};
pub use frame::{FrameError, FrameHeader, FrameKind, read_frame, write_frame};
pub use handshake::{Expect, Session, accept, dial};
pub use handshake_error::HandshakeError;
pub use listener::{Limits, ListenError, Listener, ListenerHandle};
pub use message::{ENCRYPTED, Hello, PROTOCOL, Purpose};
pub use secret::{Secret, SecretError};
pub use stream::{ReadHalf, Stream, WriteHalf};
