//! The launcher of every node except node 0: connects to the coordinator, serves as a node agent, and reconnects when
//! the coordinator is lost.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use lockstep_comm::wire::{
    self, AttemptError as WireError, ConnectError, HandshakeError, Hello, Purpose, Route, Secret,
    Stream,
};

use super::agent::{AgentExit, NodeAgent};
use super::connection;
use super::messages::{AgentMessage, CoordinatorMessage};
use super::{expect, launcher_secret};
use crate::events::{Event, Order};
use crate::{DEFAULT_PORT, LaunchError, LaunchSpec, Outcome, output};

/// Time until the coordinator's address is resolved again.
const ATTEMPT: Duration = Duration::from_secs(15);
/// Pause after an attempt that failed at once.
const PAUSE: Duration = Duration::from_secs(1);
/// How long to retry while another launcher has this node rank: its host may have died, which the coordinator notices
/// by its missing heartbeats.
const TAKEN_TIMEOUT: Duration = connection::HEARTBEAT_TIMEOUT.saturating_mul(2);

/// Takes part in a job with `spec.nproc_per_node` slots for ranks, until the job is finished. Waits at most `timeout`
/// for the coordinator, at the start and whenever the connection is lost.
pub fn run_agent(spec: &LaunchSpec, timeout: Duration) -> Result<Outcome, LaunchError> {
    let mut agent = NodeAgent::new(spec)?;
    let secret = launcher_secret(agent.token.as_deref())?;
    let mut refused_since = None;
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
            AgentExit::Refused(text) => {
                if refused_since.is_none() {
                    output::report(&format!("{text}; waiting for it to leave"));
                }
                if refused_since.get_or_insert_with(Instant::now).elapsed() >= TAKEN_TIMEOUT {
                    return Err(LaunchError::Rendezvous(text));
                }
                std::thread::sleep(PAUSE);
            }
            AgentExit::Disconnected if !agent.interrupted() => {
                refused_since = None;
                output::report("lost the connection to the coordinator on node 0; reconnecting");
            }
            exit => return Ok(agent.outcome(exit)),
        }
    }
}

enum Connected {
    Stream(Stream),
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
        let started = Instant::now();
        let until = deadline.min(started + ATTEMPT);
        let connected = match attempt(spec, secret, until, || signalled(events)) {
            Ok(connected) => connected,
            Err(signal) => return Ok(Connected::Signalled(signal)),
        };
        match connected {
            Ok(stream) => return Ok(Connected::Stream(stream)),
            Err(AttemptError::Retryable(error)) if Instant::now() < deadline => {
                tracing::debug!("cannot connect to the coordinator yet: {error}");
                std::thread::sleep(PAUSE.saturating_sub(started.elapsed()));
            }
            Err(AttemptError::Permanent(error) | AttemptError::Retryable(error)) => {
                return Err(LaunchError::Rendezvous(error));
            }
        }
    }
}

/// Fails with the signal that this launcher has received. Exits of abandoned ranks and orders of the lost connection
/// are outdated.
fn signalled(events: &Receiver<Event>) -> Result<(), i32> {
    while let Ok(event) = events.try_recv() {
        if let Event::Signalled(signal) = event {
            return Err(signal);
        }
    }
    Ok(())
}

/// The outer error is that of `check`.
fn attempt(
    spec: &LaunchSpec,
    secret: &Secret,
    deadline: Instant,
    mut check: impl FnMut() -> Result<(), i32>,
) -> Result<Result<Stream, AttemptError>, i32> {
    check()?;
    let addr = match address(spec) {
        Ok(addr) => addr,
        Err(error) => return Ok(Err(error)),
    };
    let expect = expect(spec);
    let hello = Hello {
        version: expect.version,
        generation: expect.generation,
        config: expect.config,
        from: spec.node_rank as u32,
        to: expect.rank,
        purpose: Purpose::Control,
    };
    let route = Route { addr, socks5: spec.transport.socks5 };
    let connected = wire::connect_while(route, &hello, secret, deadline, check)?;
    Ok(connected.map_err(|error| match error {
        ConnectError::Permanent {
            addr,
            cause: WireError::Handshake(HandshakeError::ConfigDiffers { .. }),
            ..
        } => AttemptError::Permanent(format!(
            "the coordinator at {addr} trains another run; start all launchers with the same run file and overrides, \
             and give each run its own --master-port"
        )),
        ConnectError::Permanent { .. } => AttemptError::Permanent(error.to_string()),
        ConnectError::Deadline { .. } => AttemptError::Retryable(error.to_string()),
    }))
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
