//! A connection between two launchers: messages in both directions, heartbeats in between. Does not interpret messages;
//! reports the end of the connection exactly once.

use std::io::Write;
use std::net::Shutdown;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use lockstep_comm::wire::Stream;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::messages;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// A launcher that sends nothing for this long is lost.
pub(super) const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// Sends the messages of `outgoing` and calls `on_message` with each received one, and with `None` when the connection
/// is closed. Closes it when `outgoing` ends.
pub(crate) fn run<Out, In>(
    stream: Stream,
    outgoing: Receiver<Out>,
    mut on_message: impl FnMut(Option<In>) + Send + 'static,
) -> std::io::Result<()>
where
    Out: Serialize + Send + 'static,
    In: DeserializeOwned,
{
    stream.tcp().set_read_timeout(Some(HEARTBEAT_TIMEOUT))?;
    stream.tcp().set_write_timeout(Some(HEARTBEAT_TIMEOUT))?;
    let Stream { mut reader, mut writer } = stream;
    let write = move || {
        loop {
            let message = match outgoing.recv_timeout(HEARTBEAT_INTERVAL) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let written = writer.write_all(&messages::encode(message.as_ref()));
            if written.and_then(|()| writer.flush()).is_err() {
                break;
            }
        }
        // Wakes the reader as well.
        let _ = writer.tcp().shutdown(Shutdown::Both);
    };
    let read = move || {
        while let Ok(message) = messages::receive(&mut reader) {
            if message.is_some() {
                on_message(message);
            }
        }
        let _ = reader.tcp().shutdown(Shutdown::Both);
        on_message(None);
    };
    thread::Builder::new().name("launcher-out".into()).spawn(write)?;
    thread::Builder::new().name("launcher-in".into()).spawn(read)?;
    Ok(())
}
