//! The driver of a chaos run: starts ranks, strikes one of them down, and holds the survivors'
//! verdicts against what it knows.

use crate::rank::{ENGINE, HEARTBEAT_MS, IDENTITY, JOINED, VERDICT, Verdict};
use lockstep_comm::{Identity, Launcher, TokenSource, token};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

pub struct Plan {
    kills: usize,
    stops: usize,
    ranks: usize,
    engine: String,
    heartbeat_ms: u64,
}

impl Plan {
    pub fn parse(arguments: &[String]) -> Result<Plan, String> {
        let mut plan =
            Plan { kills: 100, stops: 20, ranks: 4, engine: "shm".into(), heartbeat_ms: 2000 };
        for pair in arguments.chunks(2) {
            let [name, value] = pair else { return Err(format!("{} lacks a value", pair[0])) };
            let number = || value.parse::<usize>().map_err(|e| format!("{name} {value}: {e}"));
            match name.as_str() {
                "--kills" => plan.kills = number()?,
                "--stops" => plan.stops = number()?,
                "--ranks" => plan.ranks = number()?.max(2),
                "--heartbeat-ms" => plan.heartbeat_ms = number()? as u64,
                "--engine" if ["shm", "tcp"].contains(&value.as_str()) => {
                    plan.engine.clone_from(value);
                }
                _ => return Err(format!("{name} {value} is not understood")),
            }
        }
        Ok(plan)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Blow {
    Kill,
    Stop,
}

impl Blow {
    fn signal(self) -> i32 {
        match self {
            Blow::Kill => libc::SIGKILL,
            Blow::Stop => libc::SIGSTOP,
        }
    }

    /// How long the survivors may take to know.
    fn limit(self, plan: &Plan) -> Duration {
        match self {
            Blow::Kill => Duration::from_secs(1),
            Blow::Stop => Duration::from_millis(plan.heartbeat_ms + 1000),
        }
    }
}

/// Runs the plan; gives the exit code.
pub fn run(plan: &Plan) -> i32 {
    println!(
        "chaos: {} ranks over {}, {} kills (limit 1 s), {} stops (heartbeat {} ms, limit +1 s)",
        plan.ranks, plan.engine, plan.kills, plan.stops, plan.heartbeat_ms
    );
    let mut missed = 0;
    println!(
        "{:<6} {:>6} {:>10} {:>10} {:>10} {:>8}",
        "blow", "runs", "median", "p95", "max", "misses"
    );
    for (name, blow, runs) in [("kill", Blow::Kill, plan.kills), ("stop", Blow::Stop, plan.stops)] {
        let mut times = Vec::new();
        let mut misses = 0;
        for number in 0..runs {
            match strike(plan, blow, number) {
                Ok(seen) => times.extend(seen),
                Err(what) => {
                    eprintln!("{name} {number}: {what}");
                    misses += 1;
                }
            }
        }
        times.sort();
        let at = |part: f64| {
            let index = (times.len().saturating_sub(1) as f64 * part).round() as usize;
            times.get(index).map_or("-".into(), |t| format!("{} ms", t.as_millis()))
        };
        println!(
            "{name:<6} {runs:>6} {:>10} {:>10} {:>10} {misses:>8}",
            at(0.5),
            at(0.95),
            at(1.0)
        );
        missed += misses;
    }
    i32::from(missed > 0)
}

/// One world, one blow. Gives each survivor's time, or what went wrong.
fn strike(plan: &Plan, blow: Blow, number: usize) -> Result<Vec<Duration>, String> {
    let files = shared_files();
    let mut ranks = Ranks::start(plan);
    for rank in 0..plan.ranks {
        let line = ranks.line(rank, Duration::from_secs(30))?;
        if line != JOINED {
            return Err(format!("rank {rank} did not join: {line}"));
        }
    }
    let victim = random() as usize % plan.ranks;
    std::thread::sleep(Duration::from_micros(random() % 300_000));
    let since = Instant::now();
    ranks.signal(victim, blow.signal());

    let limit = blow.limit(plan);
    let mut times = Vec::new();
    let mut wrong = Vec::new();
    for rank in (0..plan.ranks).filter(|r| *r != victim) {
        // Longer than allowed, to learn how late a late one is.
        match ranks.verdict(rank, since, limit + Duration::from_secs(35)) {
            Err(what) => wrong.push(what),
            Ok((verdict, after)) if verdict.guilty != Some(victim) => {
                wrong.push(format!(
                    "rank {rank} blames {:?} after {after:?}: {}",
                    verdict.guilty, verdict.error
                ));
            }
            Ok((verdict, after)) if after > limit => {
                wrong.push(format!("rank {rank} took {after:?}: {}", verdict.error));
            }
            Ok((_, after)) => times.push(after),
        }
    }
    ranks.all_end(victim, &mut wrong);
    drop(ranks);
    if shared_files() != files {
        wrong.push("files were left in /dev/shm".into());
    }
    match wrong.is_empty() {
        true => Ok(times),
        false => Err(format!("run {number}, rank {victim} was struck: {}", wrong.join("; "))),
    }
}

struct Ranks {
    children: Vec<Child>,
    lines: Vec<Receiver<(Instant, String)>>,
}

impl Ranks {
    fn start(plan: &Plan) -> Ranks {
        let port = free_port();
        let token = token::random().expect("random bytes");
        let mut ranks = Ranks { children: vec![], lines: vec![] };
        for rank in 0..plan.ranks {
            let identity = Identity {
                rank,
                size: plan.ranks,
                local_rank: rank,
                local_size: plan.ranks,
                node: 0,
                master_addr: "127.0.0.1".into(),
                master_port: port,
                token: TokenSource::Env(token.clone()),
                generation: 0,
                bind: None,
                listener_fd: None,
                launcher: Launcher::Explicit,
            };
            let mut command = Command::new(std::env::current_exe().expect("we have a path"));
            let identity = serde_json::to_string(&identity).expect("plain data");
            command.env(IDENTITY, identity).env(ENGINE, &plan.engine);
            command.env(HEARTBEAT_MS, plan.heartbeat_ms.to_string()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("this program can be started");
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            let (sender, lines) = channel();
            // Read at once, so that the time of a line is when it was said.
            std::thread::spawn(move || {
                for line in output.lines().map_while(Result::ok) {
                    if sender.send((Instant::now(), line)).is_err() {
                        return;
                    }
                }
            });
            ranks.children.push(child);
            ranks.lines.push(lines);
        }
        ranks
    }

    fn signal(&self, rank: usize, signal: i32) {
        // SAFETY: a plain call; the child is ours and not yet waited for.
        unsafe { libc::kill(self.children[rank].id() as i32, signal) };
    }

    fn line(&self, rank: usize, limit: Duration) -> Result<String, String> {
        Ok(self.timed_line(rank, limit)?.1)
    }

    fn timed_line(&self, rank: usize, limit: Duration) -> Result<(Instant, String), String> {
        self.lines[rank].recv_timeout(limit).map_err(|e| match e {
            RecvTimeoutError::Timeout => format!("rank {rank} said nothing for {limit:?}"),
            RecvTimeoutError::Disconnected => format!("rank {rank} ended without a verdict"),
        })
    }

    fn verdict(
        &self,
        rank: usize,
        since: Instant,
        limit: Duration,
    ) -> Result<(Verdict, Duration), String> {
        let (at, line) = self.timed_line(rank, limit)?;
        let verdict =
            serde_json::from_str(&line).map_err(|e| format!("rank {rank} said {line}: {e}"))?;
        Ok((verdict, at.saturating_duration_since(since)))
    }

    /// Every survivor ends soon after its verdict, with the code that says so.
    fn all_end(&mut self, victim: usize, wrong: &mut Vec<String>) {
        let limit = Instant::now() + Duration::from_secs(3);
        for (rank, child) in self.children.iter_mut().enumerate().filter(|(r, _)| *r != victim) {
            loop {
                match child.try_wait() {
                    Ok(Some(end)) if end.code() == Some(VERDICT) => break,
                    Ok(Some(end)) => {
                        wrong.push(format!("rank {rank} ended with {end}"));
                        break;
                    }
                    _ if Instant::now() > limit => {
                        wrong.push(format!("rank {rank} still runs 3 s later"));
                        break;
                    }
                    _ => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            // Those that have ended are past caring.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Files of ours among the shared memory that has names; others of this machine may have theirs.
fn shared_files() -> Vec<std::ffi::OsString> {
    let Ok(folder) = std::fs::read_dir("/dev/shm") else { return vec![] };
    let mut names: Vec<_> = folder.flatten().map(|entry| entry.file_name()).collect();
    names.retain(|name| name.to_string_lossy().contains("lockstep"));
    names.sort();
    names
}

/// Nobody needs to be able to repeat a run, so the hasher's own randomness will do.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Below the ports that the system hands out to dialers, so nobody else comes by it.
fn free_port() -> u16 {
    loop {
        let port = 10_000 + (random() % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
