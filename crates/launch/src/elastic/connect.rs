//! The launcher of every node except node 0: connects to the coordinator, serves as a node agent, and reconnects when
//! the coordinator is lost.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use lockstep_comm::wire::{self, ConnectError, Hello, Purpose, Secret};

use super::agent::{AgentExit, NodeAgent};
use super::connection;
use super::messages::{AgentMessage, CoordinatorMessage};
use super::{expect, launcher_secret};
use crate::events::{Event, Order};
use crate::{DEFAULT_PORT, LaunchError, LaunchSpec, Outcome, output};

/// Timeout of one connection attempt; signals are handled between attempts.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Takes part in a job with `spec.nproc_per_node` slots for ranks, until the job is finished. Waits at most `timeout`
/// for the coordinator, at the start and whenever the connection is lost.
pub fn run_agent(spec: &LaunchSpec, timeout: Duration) -> Result<Outcome, LaunchError> {
    let mut agent = NodeAgent::new(spec)?;
    let secret = launcher_secret(agent.token.as_deref())?;
    loop {
        let stream = match connect(spec, &secret, timeout, &agent.events.receiver)? {
            Connected::Stream(stream) => stream,
            Connected::Signalled(signal) => return Ok(agent.outcome(AgentExit::Signalled(signal))),
        };
        let (sender, outgoing) = mpsc::channel();
        let (events, master_addr) = (agent.events.sender.clone(), spec.master_addr.clone());
        let on_message = move |message: Option<CoordinatorMessage>| {
            let order =
                message.map_or(Order::Disconnected, |message| message.into_order(&master_addr));
            let _ = events.send(Event::Ordered(order));
        };
        connection::run(stream, outgoing, on_message)
            .map_err(|cause| LaunchError::System { action: "talk to the coordinator", cause })?;
        let send = |message: AgentMessage| drop(sender.send(message));
        send(agent.join());
        match agent.serve(&send)? {
            AgentExit::Disconnected if !agent.interrupted() => {
                output::report("lost the connection to the coordinator on node 0; reconnecting");
            }
            exit => return Ok(agent.outcome(exit)),
        }
    }
}

enum Connected {
    Stream(TcpStream),
    Signalled(i32),
}

enum AttemptError {
    Retryable(String),
    Permanent(String),
}

fn connect(
    spec: &LaunchSpec,
    secret: &Secret,
    timeout: Duration,
    events: &Receiver<Event>,
) -> Result<Connected, LaunchError> {
    let deadline = Instant::now() + timeout;
    loop {
        // Exits of abandoned ranks and orders of the lost connection are outdated.
        while let Ok(event) = events.try_recv() {
            if let Event::Signalled(signal) = event {
                return Ok(Connected::Signalled(signal));
            }
        }
        let started = Instant::now();
        match attempt(spec, secret) {
            Ok(stream) => return Ok(Connected::Stream(stream)),
            Err(AttemptError::Retryable(error)) if Instant::now() < deadline => {
                tracing::debug!("cannot connect to the coordinator yet: {error}");
                std::thread::sleep(ATTEMPT.saturating_sub(started.elapsed()));
            }
            Err(AttemptError::Permanent(error) | AttemptError::Retryable(error)) => {
                return Err(LaunchError::Rendezvous(error));
            }
        }
    }
}

fn attempt(spec: &LaunchSpec, secret: &Secret) -> Result<TcpStream, AttemptError> {
    let expect = expect();
    let hello = Hello {
        version: expect.version,
        generation: expect.generation,
        config: expect.config,
        from: spec.node_rank as u32,
        to: expect.rank,
        purpose: Purpose::Control,
    };
    let deadline = Instant::now() + ATTEMPT;
    wire::connect(address(spec)?, &hello, secret, deadline).map_err(|error| match error {
        ConnectError::Permanent { .. } => AttemptError::Permanent(error.to_string()),
        ConnectError::Deadline { .. } => AttemptError::Retryable(error.to_string()),
    })
}

/// Resolves the coordinator's address anew for each attempt: it may change when a node is replaced.
fn address(spec: &LaunchSpec) -> Result<SocketAddr, AttemptError> {
    let port = if spec.master_port == 0 { DEFAULT_PORT } else { spec.master_port };
    let host = spec.master_addr.as_str();
    let unknown =
        |error: String| AttemptError::Retryable(format!("cannot resolve {host}: {error}"));
    let mut found = (host, port).to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    found.next().ok_or_else(|| unknown("no addresses found".into()))
}
