//! The launcher of any other node: it finds the first one's, serves under it, and looks for it again when it is gone.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use super::lead::order;
use super::link;
use super::node::{self, Memory, Parted};
use super::words::{Said, Told};
use super::{expect, job_secret, node_name, outcome};
use crate::events::{Event, Order, SignalWatch};
use crate::{DEFAULT_PORT, LaunchError, LaunchSpec, Outcome, output};
use lockstep_comm::wire::{self, ConnectError, Hello, Purpose, Secret};

/// One attempt to reach the first node; signals are looked at in between.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Takes part in a job with places for `spec.nproc_per_node` ranks, until it is over. While the first node is away,
/// as when its launcher is being restarted, it is waited for, but no longer than `patience`.
pub fn follow(spec: &LaunchSpec, patience: Duration) -> Result<Outcome, LaunchError> {
    let mistakes = spec.mistakes();
    if !mistakes.is_empty() {
        return Err(LaunchError::Mistakes(mistakes));
    }
    let shared_token = spec.token.load().map_err(LaunchError::Token)?;
    let secret = job_secret(shared_token.as_deref())?;
    let (sender, events) = mpsc::channel();
    let _signals = SignalWatch::start(sender.clone())
        .map_err(|cause| LaunchError::System { act: "watch for signals", cause })?;
    let mut memory = Memory::default();
    loop {
        let stream = match find(spec, &secret, patience, &events)? {
            Found::First(stream) => stream,
            Found::Signalled(signal) => return Ok(outcome(Parted::Signalled(signal), memory)),
        };
        let (out, outgoing) = mpsc::channel();
        let (to, master) = (sender.clone(), spec.master_addr.clone());
        let hand_on = move |told: Option<Told>| {
            let order = told.map_or(Order::Lost, |told| order(told, &master));
            let _ = to.send(Event::Told(order));
        };
        link::carry(stream, outgoing, hand_on)
            .map_err(|cause| LaunchError::System { act: "talk to the first node", cause })?;
        let tell = |said: Said| drop(out.send(said));
        tell(Said::Here { name: node_name(), slots: spec.nproc_per_node });
        let shared = shared_token.as_deref();
        match node::serve(spec, shared, (&sender, &events), &tell, &mut memory)? {
            Parted::Lost if memory.interrupted.is_none() => {
                output::say("the first node is gone; looking for it");
            }
            parted => return Ok(outcome(parted, memory)),
        }
    }
}

enum Found {
    First(std::net::TcpStream),
    Signalled(i32),
}

fn find(
    spec: &LaunchSpec,
    secret: &Secret,
    patience: Duration,
    events: &Receiver<Event>,
) -> Result<Found, LaunchError> {
    let until = Instant::now() + patience;
    let expect = expect();
    let hello = Hello {
        version: expect.version,
        generation: expect.generation,
        config: expect.config,
        from: spec.node_rank as u32,
        to: expect.rank,
        purpose: Purpose::Control,
    };
    loop {
        // Ends of ranks that were given up, and last words, are of no interest here.
        while let Ok(event) = events.try_recv() {
            if let Event::Signalled(signal) = event {
                return Ok(Found::Signalled(signal));
            }
        }
        let began = Instant::now();
        let tried = address(spec).and_then(|at| {
            wire::connect(at, &hello, secret, Instant::now() + ATTEMPT).map_err(|error| match error
            {
                // Waiting does not mend it.
                ConnectError::Final { .. } => Trouble::Final(error.to_string()),
                ConnectError::Deadline { .. } => Trouble::NotYet(error.to_string()),
            })
        });
        match tried {
            Ok(stream) => return Ok(Found::First(stream)),
            Err(Trouble::NotYet(why)) if Instant::now() < until => {
                tracing::debug!("the first node is not there yet: {why}");
                std::thread::sleep(ATTEMPT.saturating_sub(began.elapsed()));
            }
            Err(Trouble::Final(why) | Trouble::NotYet(why)) => {
                return Err(LaunchError::Node { what: why });
            }
        }
    }
}

enum Trouble {
    NotYet(String),
    Final(String),
}

/// Asked anew each time: a name may come to mean another address when a node is replaced.
fn address(spec: &LaunchSpec) -> Result<SocketAddr, Trouble> {
    let port = if spec.master_port == 0 { DEFAULT_PORT } else { spec.master_port };
    let host = spec.master_addr.as_str();
    let unknown = |why: String| Trouble::NotYet(format!("{host} has no address: {why}"));
    let mut found = (host, port).to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    found.next().ok_or_else(|| unknown("none was found".into()))
}
