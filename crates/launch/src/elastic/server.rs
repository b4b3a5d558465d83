//! The launcher of node 0: receives messages of all nodes, passes them to the [`Coordinator`] and carries out its
//! decisions. It also serves as node agent of its own node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use lockstep_comm::wire::{Hello, ListenError, Listener, ListenerHandle, Stream};

use super::agent::{AgentExit, NodeAgent};
use super::connection;
use super::coordinator::{Coordinator, Decision, NODE_ZERO, Rules, Seats};
use super::messages::{AgentMessage, CoordinatorMessage, JoinMessage, NodeResult, StartMessage};
use super::{Job, expect, launcher_secret};
use crate::events::{Assignment, Event, Order};
use crate::{DEFAULT_PORT, LaunchError, LaunchSpec, Outcome, output, rendezvous};

/// Interval at which the coordinator checks its timeouts.
const TICK: Duration = Duration::from_millis(200);
/// Time for the final message to reach the other nodes.
const FINISH_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a job from node 0, which has `spec.nproc_per_node` slots for ranks, until it is finished. With several nodes,
/// the other launchers connect to the master address and port.
///
/// Ranks are tied to the calling thread: if it dies, even by SIGKILL, they die with it.
pub fn run_coordinator(spec: &LaunchSpec, job: Job) -> Result<Outcome, LaunchError> {
    let mut agent = NodeAgent::new(spec)?;
    let (inbox, inputs) = mpsc::channel();
    let _listener = match spec.nnodes {
        1 => None,
        _ => Some(listen(spec, agent.token.as_deref(), inbox.clone())?),
    };
    let Job { nodes, ranks, policy, fit, next_generation, progress } = job;
    let server = Server {
        coordinator: Coordinator::new(Rules { nodes, ranks, fit, policy }, progress()),
        next_generation,
        progress,
        spec: spec.clone(),
        local: agent.events.sender.clone(),
        joining: BTreeMap::new(),
        remotes: BTreeMap::new(),
        refused: BTreeSet::new(),
        generation: None,
        inbox: inbox.clone(),
        started: Instant::now(),
    };
    let coordinator = thread::Builder::new()
        .name("coordinator".into())
        .spawn(move || server.run(&inputs))
        .map_err(|cause| LaunchError::System { action: "start the coordinator's thread", cause })?;

    // The coordinator's thread, which has the receiver, outlives this agent.
    let send = |message| {
        let kind = InputKind::Message(message);
        let _ = inbox.send(Input { node: NODE_ZERO, connection: 0, kind });
    };
    send(agent.join());
    let exit = agent.serve(&send)?;
    if let AgentExit::Finished { .. } = exit {
        let _ = coordinator.join();
    }
    Ok(agent.outcome(exit))
}

struct Input {
    node: u32,
    /// Numbers the connections of all nodes; input from an old connection is ignored. 0 is the local agent.
    connection: u64,
    kind: InputKind,
}

enum InputKind {
    Connected(Stream),
    Message(AgentMessage),
    Disconnected,
}

fn listen(
    spec: &LaunchSpec,
    token: Option<&str>,
    inbox: Sender<Input>,
) -> Result<ListenerHandle, LaunchError> {
    let port = if spec.master_port == 0 { DEFAULT_PORT } else { spec.master_port };
    let (_, socket) = rendezvous::listen(spec, port)?;
    let failed = |cause: ListenError| LaunchError::System {
        action: "accept connections of other launchers",
        cause: std::io::Error::other(cause),
    };
    let on_connect = move |hello: Hello, stream: Stream, _| {
        let kind = InputKind::Connected(stream);
        let _ = inbox.send(Input { node: hello.from, connection: 0, kind });
    };
    let listener = Listener::from_std(socket).map_err(failed)?;
    listener.serve(expect(spec), launcher_secret(token)?, on_connect).map_err(failed)
}

struct Server {
    coordinator: Coordinator,
    next_generation: Box<dyn FnMut() -> Result<u32, String> + Send>,
    progress: Box<dyn Fn() -> u64 + Send>,
    spec: LaunchSpec,
    local: Sender<Event>,
    /// Connections that have not sent their first message, by their number.
    joining: BTreeMap<u64, Sender<CoordinatorMessage>>,
    remotes: BTreeMap<u32, Remote>,
    /// Launchers whose refusal was reported.
    refused: BTreeSet<String>,
    generation: Option<u32>,
    inbox: Sender<Input>,
    started: Instant,
}

/// Another node that takes part.
struct Remote {
    /// Number of its current connection.
    connection: u64,
    sender: Sender<CoordinatorMessage>,
    launcher: JoinMessage,
}

impl Server {
    fn run(mut self, inputs: &Receiver<Input>) {
        let mut connections = 0;
        while !self.coordinator.is_finished() {
            let decisions = match inputs.recv_timeout(TICK) {
                Ok(Input { node, kind: InputKind::Connected(stream), .. }) => {
                    connections += 1;
                    self.accept(node, connections, stream);
                    vec![]
                }
                Ok(input) => self.handle(input),
                Err(RecvTimeoutError::Timeout) => self.coordinator.tick(self.started.elapsed()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.carry_out(decisions);
        }
        // The others close their connections when they have received the final message.
        let deadline = Instant::now() + FINISH_TIMEOUT;
        while !self.remotes.is_empty() {
            match inputs.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Input { node, kind: InputKind::Disconnected, .. }) => {
                    self.remotes.remove(&node);
                }
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    fn accept(&mut self, node: u32, connection: u64, stream: Stream) {
        if node == NODE_ZERO {
            output::report(
                "rejected another launcher with node rank 0; give every launcher its own --node-rank",
            );
            return;
        }
        let (sender, outgoing) = mpsc::channel();
        let inbox = self.inbox.clone();
        let on_message = move |message: Option<AgentMessage>| {
            let kind = message.map_or(InputKind::Disconnected, InputKind::Message);
            let _ = inbox.send(Input { node, connection, kind });
        };
        match connection::run(stream, outgoing, on_message) {
            Ok(()) => drop(self.joining.insert(connection, sender)),
            Err(error) => output::report(&format!("cannot accept node {node}: {error}")),
        }
    }

    fn handle(&mut self, input: Input) -> Vec<Decision> {
        let Input { node, connection, kind } = input;
        let now = self.started.elapsed();
        if let (Some(sender), InputKind::Message(AgentMessage::Join(launcher))) =
            (self.joining.remove(&connection), &kind)
        {
            if self.refuse(node, launcher, &sender) {
                return vec![];
            }
            let remote = Remote { connection, sender, launcher: launcher.clone() };
            self.remotes.insert(node, remote);
        }
        let current = self.remotes.get(&node).map_or(0, |remote| remote.connection);
        if connection != current {
            return vec![];
        }
        match kind {
            InputKind::Message(AgentMessage::Join(JoinMessage { host, slots, .. })) => {
                self.coordinator.node_joined(now, node, &host, slots)
            }
            InputKind::Message(AgentMessage::Leaving { signal }) => {
                self.coordinator.node_leaving(now, node, signal)
            }
            InputKind::Message(AgentMessage::Finished { generation, result }) => {
                // A late message of an earlier generation.
                if Some(generation) != self.generation {
                    return vec![];
                }
                if let (NodeResult::Failed { text, .. }, true) = (&result, node != NODE_ZERO) {
                    output::report(&format!("node {node}: {text}"));
                }
                self.coordinator.node_finished(now, node, result, (self.progress)())
            }
            InputKind::Connected(_) => vec![],
            InputKind::Disconnected => {
                self.remotes.remove(&node);
                self.coordinator.node_lost(now, node)
            }
        }
    }

    /// Refuses a launcher whose node rank is taken by another one that is connected. A launcher that reconnects
    /// replaces its own connection.
    fn refuse(
        &mut self,
        node: u32,
        launcher: &JoinMessage,
        sender: &Sender<CoordinatorMessage>,
    ) -> bool {
        let holder = self.remotes.get(&node).map(|remote| &remote.launcher);
        let Some(holder) = holder.filter(|holder| holder.launcher != launcher.launcher) else {
            return false;
        };
        let text = format!("node rank {node} is in use by {}", holder.process());
        if self.refused.insert(launcher.launcher.clone()) {
            output::report(&format!("refused {}: {text}", launcher.process()));
        }
        let _ = sender.send(CoordinatorMessage::Refuse(text));
        true
    }

    fn carry_out(&mut self, decisions: Vec<Decision>) {
        for decision in decisions {
            match decision {
                Decision::Report(text) => output::report(&text),
                Decision::Stop(nodes) => self.send_all(nodes, CoordinatorMessage::Stop),
                Decision::Abort(nodes) => self.send_all(nodes, CoordinatorMessage::Abort),
                Decision::Finish { node, code, text } => {
                    self.send(node, CoordinatorMessage::Finish { code, text });
                }
                Decision::Start(seats) => {
                    if let Err(error) = self.start_generation(seats) {
                        let decisions = self.coordinator.start_failed(&error);
                        self.carry_out(decisions);
                    }
                }
            }
        }
    }

    fn start_generation(&mut self, seats: Seats) -> Result<(), String> {
        let generation = (self.next_generation)()?;
        let (port, listener) =
            rendezvous::listen(&self.spec, 0).map_err(|error| error.to_string())?;
        let mut listener = Some(listener);
        self.generation = Some(generation);
        let size = seats.iter().map(|(_, slots)| slots.len()).sum();
        let mut first_rank = 0;
        for (node, slots) in seats {
            let ranks = slots.len();
            let start = StartMessage {
                generation,
                first_rank,
                slots,
                size,
                node: node as usize,
                master_port: port,
            };
            if node == NODE_ZERO {
                let assignment = start.into_assignment(&self.spec.master_addr);
                let assignment = Assignment { listener: listener.take(), ..assignment };
                let _ = self.local.send(Event::Ordered(Order::Start(assignment)));
            } else {
                self.send(node, CoordinatorMessage::Start(start));
            }
            first_rank += ranks;
        }
        Ok(())
    }

    fn send_all(&self, nodes: Vec<u32>, message: CoordinatorMessage) {
        nodes.into_iter().for_each(|node| self.send(node, message.clone()));
    }

    /// A node that cannot be reached is reported as disconnected by its connection.
    fn send(&self, node: u32, message: CoordinatorMessage) {
        if node == NODE_ZERO {
            let order = message.into_order(&self.spec.master_addr);
            let _ = self.local.send(Event::Ordered(order));
        } else if let Some(remote) = self.remotes.get(&node) {
            let _ = remote.sender.send(message);
        }
    }
}
