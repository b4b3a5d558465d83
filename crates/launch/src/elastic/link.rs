//! A connection between two launchers, on which words go both ways and signs of life in between. Knows no meaning of
//! words; says once that it is over, whatever ended it.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::words;

/// Between two signs of life.
const BEAT: Duration = Duration::from_secs(1);
/// A launcher that is silent for so long is lost.
const SILENCE: Duration = Duration::from_secs(6);

/// Carries what `outgoing` gives to the other end, and hands on what comes from there; `None` when the connection is
/// over. It ends when `outgoing` does, too.
pub(crate) fn carry<Out, In>(
    stream: TcpStream,
    outgoing: Receiver<Out>,
    mut hand_on: impl FnMut(Option<In>) + Send + 'static,
) -> std::io::Result<()>
where
    Out: Serialize + Send + 'static,
    In: DeserializeOwned,
{
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    let mut reader = stream.try_clone()?;
    let mut writer = stream;
    let write = move || {
        loop {
            let word = match outgoing.recv_timeout(BEAT) {
                Ok(word) => Some(word),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if writer.write_all(&words::to_frame(word.as_ref())).is_err() {
                break;
            }
        }
        // Wakes the reader, too.
        let _ = writer.shutdown(Shutdown::Both);
    };
    let read = move || {
        while let Ok(word) = words::receive(&mut reader) {
            if word.is_some() {
                hand_on(word);
            }
        }
        let _ = reader.shutdown(Shutdown::Both);
        hand_on(None);
    };
    thread::Builder::new().name("launcher-out".into()).spawn(write)?;
    thread::Builder::new().name("launcher-in".into()).spawn(read)?;
    Ok(())
}
