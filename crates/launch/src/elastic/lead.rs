//! The launcher of the first node: it hears everybody, lets the captain decide, and sends the orders; beside that it
//! serves as a node like the others. Never decides anything itself.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::captain::{Act, Captain, FIRST, Rules};
use super::link;
use super::node::{self, Memory, Parted};
use super::words::{How, Said, Start, Told};
use super::{Job, expect, job_secret, node_name, outcome};
use crate::events::{Event, Order, Share, SignalWatch};
use crate::meeting::{self, Meeting};
use crate::{DEFAULT_PORT, LaunchError, LaunchSpec, Outcome, output};
use lockstep_comm::wire::{Hello, Listener, ListenerHandle};

/// How often the captain looks at its watch.
const TICK: Duration = Duration::from_millis(200);
/// For the last words to reach the other nodes.
const TO_PART: Duration = Duration::from_secs(2);

/// Leads a job from its first node, which has places for `spec.nproc_per_node` ranks, and stays with it to the end.
/// With more nodes, their launchers are met at the master's address and port.
///
/// Ranks are bound to the calling thread: should it die, even by SIGKILL, they die with it.
pub fn lead(spec: &LaunchSpec, job: Job) -> Result<Outcome, LaunchError> {
    let mistakes = spec.mistakes();
    if !mistakes.is_empty() {
        return Err(LaunchError::Mistakes(mistakes));
    }
    let shared_token = spec.token.load().map_err(LaunchError::Token)?;
    let (sender, events) = mpsc::channel();
    let system = |act| move |cause| LaunchError::System { act, cause };
    let _signals = SignalWatch::start(sender.clone()).map_err(system("watch for signals"))?;

    let (post, mail) = mpsc::channel();
    let _door = match spec.nnodes {
        1 => None,
        _ => Some(open_the_door(spec, shared_token.as_deref(), post.clone())?),
    };
    let own = Mail { from: FIRST, serial: 0, what: What::Said(here(spec)) };
    // The captain's thread, which has the other end, lives longer than this one listens.
    let _ = post.send(own);
    let desk = Desk {
        captain: Captain::new(job.rules, (job.progress)()),
        next: job.next,
        progress: job.progress,
        spec: spec.clone(),
        own: sender.clone(),
        far: BTreeMap::new(),
        generation: None,
        post: post.clone(),
        began: Instant::now(),
    };
    let captain = thread::Builder::new()
        .name("captain".into())
        .spawn(move || desk.run(&mail))
        .map_err(system("start the captain's thread"))?;

    let tell = |said| {
        let _ = post.send(Mail { from: FIRST, serial: 0, what: What::Said(said) });
    };
    let mut memory = Memory::default();
    let shared = shared_token.as_deref();
    let parted = node::serve(spec, shared, (&sender, &events), &tell, &mut memory)?;
    if let Parted::Bye { .. } = parted {
        let _ = captain.join();
    }
    Ok(outcome(parted, memory))
}

struct Mail {
    from: u32,
    /// Which of a node's connections; the old one may be noticed to be over when there is a new one.
    serial: u64,
    what: What,
}

enum What {
    Arrived(TcpStream),
    Said(Said),
    Lost,
}

fn here(spec: &LaunchSpec) -> Said {
    Said::Here { name: node_name(), slots: spec.nproc_per_node }
}

fn open_the_door(
    spec: &LaunchSpec,
    token: Option<&str>,
    post: Sender<Mail>,
) -> Result<ListenerHandle, LaunchError> {
    let port = if spec.master_port == 0 { DEFAULT_PORT } else { spec.master_port };
    let Meeting { listener, .. } = meeting::open(spec, port)?;
    let socket = listener.expect("an open meeting has a socket");
    let cannot = |cause: lockstep_comm::wire::ListenError| LaunchError::System {
        act: "take in the other launchers",
        cause: std::io::Error::other(cause),
    };
    let arrived = move |hello: Hello, stream: TcpStream, _| {
        let _ = post.send(Mail { from: hello.from, serial: 0, what: What::Arrived(stream) });
    };
    let listener = Listener::from_std(socket).map_err(cannot)?;
    listener.serve(expect(), job_secret(token)?, arrived).map_err(cannot)
}

/// The captain's desk: what comes in goes to the captain, what it says is done.
struct Desk {
    captain: Captain,
    next: Box<dyn FnMut() -> Result<u32, String> + Send>,
    progress: Box<dyn Fn() -> u64 + Send>,
    spec: LaunchSpec,
    own: Sender<Event>,
    far: BTreeMap<u32, (u64, Sender<Told>)>,
    generation: Option<u32>,
    post: Sender<Mail>,
    began: Instant,
}

impl Desk {
    fn run(mut self, mail: &Receiver<Mail>) {
        let mut serial = 0;
        while !self.captain.is_over() {
            let acts = match mail.recv_timeout(TICK) {
                Ok(Mail { from, what: What::Arrived(stream), .. }) => {
                    serial += 1;
                    self.take_in(from, serial, stream);
                    vec![]
                }
                Ok(mail) => self.hear(mail),
                Err(RecvTimeoutError::Timeout) => self.captain.tick(self.began.elapsed()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.perform(acts);
        }
        // The others hang up when they have heard the last word.
        let until = Instant::now() + TO_PART;
        while !self.far.is_empty() {
            match mail.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Mail { from, what: What::Lost, .. }) => drop(self.far.remove(&from)),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    }

    fn take_in(&mut self, from: u32, serial: u64, stream: TcpStream) {
        if from == FIRST {
            output::say(
                "another launcher calls itself node 0, which is this one; give it a --node-rank of its own",
            );
            return;
        }
        let (out, outgoing) = mpsc::channel();
        let post = self.post.clone();
        let hand_on = move |word: Option<Said>| {
            let what = word.map_or(What::Lost, What::Said);
            let _ = post.send(Mail { from, serial, what });
        };
        match link::carry(stream, outgoing, hand_on) {
            Ok(()) => drop(self.far.insert(from, (serial, out))),
            Err(error) => output::say(&format!("cannot take in node {from}: {error}")),
        }
    }

    fn hear(&mut self, mail: Mail) -> Vec<Act> {
        let Mail { from, serial, what } = mail;
        let current = self.far.get(&from).map_or(0, |(serial, _)| *serial);
        if serial != current {
            return vec![];
        }
        let now = self.began.elapsed();
        match what {
            What::Said(Said::Here { name, slots }) => self.captain.came(now, from, &name, slots),
            What::Said(Said::Leaving { signal }) => self.captain.leaving(now, from, signal),
            What::Said(Said::Ended { generation, how }) if Some(generation) == self.generation => {
                if let (How::Failed { text, .. }, true) = (&how, from != FIRST) {
                    output::say(&format!("node {from}: {text}"));
                }
                self.captain.ended(now, from, how, (self.progress)())
            }
            What::Said(Said::Ended { .. }) | What::Arrived(_) => vec![],
            What::Lost => {
                self.far.remove(&from);
                self.captain.lost(now, from)
            }
        }
    }

    fn perform(&mut self, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Say(text) => output::say(&text),
                Act::Stop(nodes) => nodes.into_iter().for_each(|node| self.order(node, Told::Stop)),
                Act::End(nodes) => nodes.into_iter().for_each(|node| self.order(node, Told::End)),
                Act::Bye { node, code, text } => self.order(node, Told::Bye { code, text }),
                Act::Begin(seats) => {
                    if let Err(why) = self.begin(seats) {
                        let acts = self.captain.failed_to_begin(&why);
                        self.perform(acts);
                    }
                }
            }
        }
    }

    fn begin(&mut self, seats: Vec<(u32, Vec<usize>)>) -> Result<(), String> {
        let generation = (self.next)()?;
        let Meeting { port, mut listener } =
            meeting::open(&self.spec, 0).map_err(|error| error.to_string())?;
        self.generation = Some(generation);
        let size = seats.iter().map(|(_, slots)| slots.len()).sum();
        let mut first_rank = 0;
        for (node, slots) in seats {
            let ranks = slots.len();
            let start = Start {
                generation,
                first_rank,
                slots,
                size,
                node: node as usize,
                master_port: port,
            };
            match node {
                FIRST => {
                    let share = start.share(&self.spec.master_addr);
                    let share = Share { listener: listener.take(), ..share };
                    let _ = self.own.send(Event::Told(Order::Start(share)));
                }
                _ => self.order(node, Told::Start(start)),
            }
            first_rank += ranks;
        }
        Ok(())
    }

    /// Who cannot be told any more is lost, and that is heard of.
    fn order(&self, node: u32, told: Told) {
        if node == FIRST {
            let _ = self.own.send(Event::Told(order(told, &self.spec.master_addr)));
        } else if let Some((_, out)) = self.far.get(&node) {
            let _ = out.send(told);
        }
    }
}

/// A word of the captain as the launcher takes it.
pub(super) fn order(told: Told, master_addr: &str) -> Order {
    match told {
        Told::Start(start) => Order::Start(start.share(master_addr)),
        Told::Stop => Order::Stop,
        Told::End => Order::End,
        Told::Bye { code, text } => Order::Bye { code, text },
    }
}

/// What the captain goes by, for whoever sets it.
pub(super) type JobRules = Rules;
