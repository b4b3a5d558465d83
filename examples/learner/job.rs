//! The job: starts the producers and the learner process, kills the learner as asked, and restarts it.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, Sender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};

use super::frames::{receive, send};
use super::producer::{Broadcast, start_producers};
use super::{Kill, Message, PRODUCERS, RANKS, SEQ, SETTINGS, Sample, Settings, State, plan};

/// The producers, and the learner that they restart.
pub struct Job<'a> {
    pub updates: u64,
    pub save_every: u64,
    pub batch: usize,
    /// A temporary folder, which is removed at the end.
    pub folder: &'a Path,
}

impl Job<'_> {
    /// Runs to the last update. The learner is `start` with its settings in the environment; it is killed as listed, in
    /// this order. Checks that every rollout was used once or rejected, and returns the final state.
    pub fn run(
        &self,
        kills: &[Kill],
        start: impl Fn() -> anyhow::Result<Command>,
    ) -> anyhow::Result<State> {
        let _removed = RemovedAtEnd(self.folder);
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let settings = Settings {
            updates: self.updates,
            save_every: self.save_every,
            batch: self.batch,
            folder: self.folder.to_path_buf(),
            producers: listener.local_addr()?,
        };
        let shape = plan(self.batch)?.model;
        let (sender, samples) = sync_channel(self.batch / 2);
        let to_learner = Connection::default();
        let (producers, to_producers) = start_producers(&shape, &sender);
        drop(sender);
        println!("-- {PRODUCERS} producers generate rollouts, a learner with {RANKS} ranks trains");
        let result = std::thread::scope(|scope| {
            let connection = &to_learner;
            scope.spawn(move || connection.forward(&samples));
            let result: anyhow::Result<State> = (|| {
                let mut kills = kills.iter();
                loop {
                    let mut command = start()?;
                    command.env(SETTINGS, serde_json::to_string(&settings)?);
                    let mut learner = Learner::start(command, &listener)?;
                    to_learner.set(Some(learner.stream.try_clone()?));
                    let ended = learner.serve(kills.next(), &to_learner, &to_producers)?;
                    to_learner.set(None);
                    match ended {
                        Some(state) => return Ok(state),
                        None => println!("-- the learner was killed; it restarts"),
                    }
                }
            })();
            // Producers stop when their channels are closed, and so does the forwarding thread.
            drop(to_producers);
            to_learner.close();
            result
        });
        for producer in producers {
            producer.join().expect("producers do not panic");
        }
        let state = result?;
        self.check(&state);
        Ok(state)
    }

    fn check(&self, state: &State) {
        let State { ledger, used } = state;
        let (counts, wanted) = (ledger.counts(), self.updates * self.batch as u64);
        let all: Vec<(&String, &u64)> =
            used.iter().flat_map(|(name, used)| used.iter().map(move |one| (name, one))).collect();
        let distinct: BTreeSet<_> = all.iter().collect();
        assert_eq!(all.len() as u64, wanted, "each update uses one batch");
        assert_eq!(distinct.len(), all.len(), "no rollout is used twice");
        assert_eq!(counts.accepted, wanted, "the ledger agrees");
        for (name, number) in all {
            assert!(ledger.is_settled(name, *number), "{name} {number} is used but not settled");
        }
        let settled: u64 = ledger.producers().map(|name| ledger.cursor(name)).sum();
        let verdicts = counts.accepted + counts.stale + counts.future_version;
        assert!(settled <= verdicts, "{settled} rollouts, {verdicts} verdicts: one verdict each");
    }
}

/// A folder that is removed when the job ends, successfully or not.
struct RemovedAtEnd<'a>(&'a Path);

impl Drop for RemovedAtEnd<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0);
    }
}

/// The learner process and its connection.
struct Learner {
    process: Child,
    stream: TcpStream,
}

impl Learner {
    fn start(mut command: Command, listener: &TcpListener) -> anyhow::Result<Learner> {
        let mut process = command.spawn().context("cannot start the learner")?;
        listener.set_nonblocking(true)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(Learner { process, stream });
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    if let Some(status) = process.try_wait()? {
                        bail!("the learner ended before it connected: {status}");
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Passes messages to the producers until the learner has finished or is to be killed. Returns its final state, or
    /// `None` if it was killed.
    fn serve(
        &mut self,
        kill: Option<&Kill>,
        samples: &Connection,
        producers: &[Sender<Broadcast>],
    ) -> anyhow::Result<Option<State>> {
        let mut last = None;
        let mut from = BufReader::new(&self.stream);
        while let Ok((message, values)) = receive::<Message>(&mut from) {
            let at = match &message {
                Message::Next => {
                    samples.request();
                    continue;
                }
                Message::Updated { version, reward, norm, counts } => {
                    if version % 10 == 0 {
                        println!(
                            "version {version:>3} | mean reward {reward:>5.2} of {SEQ} | grad norm {norm:.3} | {counts:?}"
                        );
                    }
                    Some(Kill::AfterUpdate(*version))
                }
                Message::Saved(state) => {
                    last = Some(state.clone());
                    Some(Kill::AfterSave(state.ledger.policy_version()))
                }
                _ => None,
            };
            if at.is_some() && at.as_ref() == kill {
                // SIGKILL: the process cannot finish anything.
                self.process.kill()?;
                self.process.wait()?;
                return Ok(None);
            }
            let values = Arc::new(values);
            for producer in producers {
                // The producer may have stopped.
                let _ = producer.send((message.clone(), values.clone()));
            }
        }
        let status = self.process.wait()?;
        match last {
            _ if kill.is_some() => bail!("the learner ended ({status}) before {kill:?}"),
            Some(state) if status.success() => Ok(Some(state)),
            _ => bail!("the learner failed: {status}"),
        }
    }
}

/// The connection to the current learner.
#[derive(Default)]
struct Connection {
    state: Mutex<ConnectionState>,
    changed: Condvar,
}

#[derive(Default)]
struct ConnectionState {
    /// `None` while no learner is connected.
    stream: Option<TcpStream>,
    /// Rollouts that the learner has asked for.
    requested: usize,
    /// The job has ended.
    closed: bool,
}

impl Connection {
    fn change(&self, change: impl FnOnce(&mut ConnectionState)) {
        change(&mut self.state.lock().expect("no thread panicked"));
        self.changed.notify_all();
    }

    fn set(&self, stream: Option<TcpStream>) {
        self.change(|state| (state.stream, state.requested) = (stream, 0));
    }

    fn request(&self) {
        self.change(|state| state.requested += 1);
    }

    fn close(&self) {
        self.change(|state| state.closed = true);
    }

    /// Sends samples to the learner. A sample that is lost with a learner stays with its producer.
    fn forward(&self, samples: &Receiver<Sample>) {
        for sample in samples {
            let state = self.state.lock().expect("no thread panicked");
            let mut state = self
                .changed
                .wait_while(state, |state| state.requested == 0 && !state.closed)
                .expect("no thread panicked");
            if state.closed {
                return;
            }
            state.requested -= 1;
            let stream = state.stream.as_ref().and_then(|stream| stream.try_clone().ok());
            drop(state);
            if stream.is_none_or(|mut stream| send(&mut stream, &sample, &[]).is_err()) {
                self.set(None);
            }
        }
    }
}
