//! The node agent: starts generations as the coordinator orders and reports how they finish. Makes no decisions about
//! the job.

use lockstep_comm::token;

use super::messages::{AgentMessage, JoinMessage, NodeResult};
use crate::events::{Assignment, Event, Events, Order, SignalWatch};
use crate::exit::{self, Exit};
use crate::generation::{self, GenerationResult};
use crate::supervise::generation_token;
use crate::{Failure, LaunchError, LaunchSpec, Outcome, output};

/// Maximum length of a failure's text that is sent.
const MAX_TEXT: usize = 8 << 10;

pub(crate) struct NodeAgent<'a> {
    spec: &'a LaunchSpec,
    pub token: Option<String>,
    pub events: Events,
    /// Identifies this launcher.
    id: String,
    state: NodeState,
    _signals: SignalWatch,
}

/// State that a node keeps across generations.
#[derive(Default)]
struct NodeState {
    generation: u32,
    failure: Option<Failure>,
    interrupted: Option<i32>,
}

/// Why a node agent stopped serving.
pub(crate) enum AgentExit {
    /// The coordinator finished the job for this node.
    Finished { code: i32, text: String },
    /// The coordinator does not accept this node.
    Refused(String),
    /// The connection to the coordinator is lost.
    Disconnected,
    /// A second signal asked the launcher to exit immediately.
    Signalled(i32),
}

impl<'a> NodeAgent<'a> {
    pub fn new(spec: &'a LaunchSpec) -> Result<NodeAgent<'a>, LaunchError> {
        let token = spec.check()?;
        let events = Events::new();
        let signals = SignalWatch::start(events.sender.clone())
            .map_err(|cause| LaunchError::System { action: "watch for signals", cause })?;
        let id = token::random()
            .map_err(|cause| LaunchError::System { action: "read random bytes", cause })?;
        Ok(NodeAgent { spec, token, events, id, state: NodeState::default(), _signals: signals })
    }

    /// The message with which this node joins the job.
    pub fn join(&self) -> AgentMessage {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        AgentMessage::Join(JoinMessage {
            host: host.trim().to_string(),
            pid: std::process::id(),
            launcher: self.id.clone(),
            slots: self.spec.nproc_per_node,
        })
    }

    pub fn interrupted(&self) -> bool {
        self.state.interrupted.is_some()
    }

    /// Serves until the coordinator finishes the job or is lost. Ranks die with the calling thread.
    pub fn serve(&mut self, send: &dyn Fn(AgentMessage)) -> Result<AgentExit, LaunchError> {
        while let Ok(event) = self.events.receiver.recv() {
            let mut orders = vec![];
            match event {
                // A rank of an earlier generation that was abandoned.
                Event::Exited { .. } => {}
                Event::Signalled(signal) => match self.state.interrupted {
                    None => {
                        self.state.interrupted = Some(signal);
                        send(AgentMessage::Leaving { signal });
                    }
                    Some(_) if exit::kills_when_second(signal) => {
                        return Ok(AgentExit::Signalled(signal));
                    }
                    Some(_) => {}
                },
                Event::Ordered(Order::Start(assignment)) => {
                    orders = self.run_generation(assignment, send)?;
                }
                Event::Ordered(order) => orders.push(order),
            }
            for order in orders {
                match order {
                    Order::Finish { code, text } => return Ok(AgentExit::Finished { code, text }),
                    Order::Refused(text) => return Ok(AgentExit::Refused(text)),
                    Order::Disconnected => return Ok(AgentExit::Disconnected),
                    // No ranks are running.
                    Order::Stop | Order::Abort | Order::Start(_) => {}
                }
            }
        }
        Ok(AgentExit::Disconnected)
    }

    /// Runs one generation and returns the orders that arrived meanwhile and concern what follows.
    fn run_generation(
        &mut self,
        assignment: Assignment,
        send: &dyn Fn(AgentMessage),
    ) -> Result<Vec<Order>, LaunchError> {
        let token = generation_token(self.token.as_deref())?;
        let (generation, first_rank) = (assignment.generation, assignment.first_rank);
        let last = self.state.generation;
        if generation <= last {
            return Err(LaunchError::Rendezvous(format!(
                "the coordinator starts generation {generation}, but this node has already run generation {last}: it \
                 belongs to another run; start this launcher again"
            )));
        }
        let on_signal = |signal| send(AgentMessage::Leaving { signal });
        let result = generation::run(self.spec, assignment, token, &self.events, &on_signal)?;
        if let Some(failure) = &result.failure {
            output::report(&failure.to_string());
        }
        send(AgentMessage::Finished { generation, result: node_result(&result, first_rank) });
        self.state.generation = generation;
        self.state.interrupted = self.state.interrupted.or(result.interrupted);
        self.state.failure = result.failure;
        Ok(result.deferred)
    }

    pub fn outcome(self, exit: AgentExit) -> Outcome {
        let NodeState { generation, failure, interrupted } = self.state;
        let exit_code = match exit {
            AgentExit::Finished { code, text } => {
                if !text.is_empty() {
                    output::report(&text);
                }
                code
            }
            // `run_agent` retries or fails.
            AgentExit::Refused(_) => 1,
            AgentExit::Signalled(signal) => Exit::Signal(signal).code(),
            AgentExit::Disconnected => interrupted.map_or(1, |signal| Exit::Signal(signal).code()),
        };
        let failure = failure.filter(|_| exit_code != 0);
        Outcome { exit_code, generation, failure, interrupted }
    }
}

fn node_result(result: &GenerationResult, first_rank: usize) -> NodeResult {
    match &result.failure {
        Some(failure) => NodeResult::Failed {
            local_rank: failure.rank - first_rank,
            code: failure.exit.code(),
            permanent: result.is_permanent_failure(),
            text: truncated(failure.to_string()),
        },
        None if result.is_success() => NodeResult::Success,
        None if result.is_graceful() => NodeResult::Stopped,
        None => NodeResult::Killed,
    }
}

fn truncated(mut text: String) -> String {
    if text.len() > MAX_TEXT {
        let end = (0..=MAX_TEXT).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
        text.push('…');
    }
    text
}
