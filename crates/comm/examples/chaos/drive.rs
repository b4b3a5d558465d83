//! The driver of a chaos run: starts ranks, kills or stops one of them, and checks the reports of the
//! survivors.

use crate::rank::{ENGINE, HEARTBEAT_MS, IDENTITY, JOINED, REPORTED, Report};
use lockstep_comm::{Identity, Launcher, TokenSource, Transport, token};
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
            let [name, value] = pair else { return Err(format!("{} needs a value", pair[0])) };
            let number = || value.parse::<usize>().map_err(|e| format!("{name} {value}: {e}"));
            match name.as_str() {
                "--kills" => plan.kills = number()?,
                "--stops" => plan.stops = number()?,
                "--ranks" => plan.ranks = number()?.max(2),
                "--heartbeat-ms" => plan.heartbeat_ms = number()? as u64,
                "--engine" if ["shm", "tcp"].contains(&value.as_str()) => {
                    plan.engine.clone_from(value);
                }
                _ => return Err(format!("unknown option {name} {value}")),
            }
        }
        Ok(plan)
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Kill,
    Stop,
}

impl Fault {
    fn signal(self) -> i32 {
        match self {
            Fault::Kill => libc::SIGKILL,
            Fault::Stop => libc::SIGSTOP,
        }
    }

    /// How long the survivors may take to report it.
    fn limit(self, plan: &Plan) -> Duration {
        match self {
            Fault::Kill => Duration::from_secs(1),
            Fault::Stop => Duration::from_millis(plan.heartbeat_ms + 1000),
        }
    }
}

/// Runs the plan; returns the exit code.
pub fn run(plan: &Plan) -> i32 {
    println!(
        "chaos: {} ranks over {}, {} kills (limit 1 s), {} stops (heartbeat {} ms, limit +1 s)",
        plan.ranks, plan.engine, plan.kills, plan.stops, plan.heartbeat_ms
    );
    let mut missed = 0;
    println!(
        "{:<6} {:>6} {:>10} {:>10} {:>10} {:>8}",
        "fault", "runs", "median", "p95", "max", "misses"
    );
    for (name, fault, runs) in
        [("kill", Fault::Kill, plan.kills), ("stop", Fault::Stop, plan.stops)]
    {
        let mut times = Vec::new();
        let mut misses = 0;
        for number in 0..runs {
            match inject(plan, fault, number) {
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

/// Runs one world with one fault. Returns the time of each survivor, or the errors.
fn inject(plan: &Plan, fault: Fault, number: usize) -> Result<Vec<Duration>, String> {
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
    ranks.signal(victim, fault.signal());

    let limit = fault.limit(plan);
    let mut times = Vec::new();
    let mut wrong = Vec::new();
    for rank in (0..plan.ranks).filter(|r| *r != victim) {
        // Longer than allowed, to report how late a survivor is.
        match ranks.report(rank, since, limit + Duration::from_secs(35)) {
            Err(what) => wrong.push(what),
            Ok((report, after)) if report.culprit != Some(victim) => {
                wrong.push(format!(
                    "rank {rank} blames {:?} after {after:?}: {}",
                    report.culprit, report.error
                ));
            }
            Ok((report, after)) if after > limit => {
                wrong.push(format!("rank {rank} took {after:?}: {}", report.error));
            }
            Ok((_, after)) => times.push(after),
        }
    }
    ranks.all_end(victim, &mut wrong);
    drop(ranks);
    if shared_files() != files {
        wrong.push("files are left in /dev/shm".into());
    }
    match wrong.is_empty() {
        true => Ok(times),
        false => Err(format!("run {number}, fault in rank {victim}: {}", wrong.join("; "))),
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
                transport: Transport::default(),
                launcher: Launcher::Explicit,
            };
            let mut command = Command::new(std::env::current_exe().expect("we have a path"));
            let identity = serde_json::to_string(&identity).expect("plain data");
            command.env(IDENTITY, identity).env(ENGINE, &plan.engine);
            command.env(HEARTBEAT_MS, plan.heartbeat_ms.to_string()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("this program can be started");
            let output = BufReader::new(child.stdout.take().expect("it is piped"));
            let (sender, lines) = channel();
            // Read immediately, so that the time of a line is correct.
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
        // SAFETY: the child has not been waited for, so its process id is valid.
        unsafe { libc::kill(self.children[rank].id() as i32, signal) };
    }

    fn line(&self, rank: usize, limit: Duration) -> Result<String, String> {
        Ok(self.timed_line(rank, limit)?.1)
    }

    fn timed_line(&self, rank: usize, limit: Duration) -> Result<(Instant, String), String> {
        self.lines[rank].recv_timeout(limit).map_err(|e| match e {
            RecvTimeoutError::Timeout => format!("no output of rank {rank} for {limit:?}"),
            RecvTimeoutError::Disconnected => format!("rank {rank} ended without a report"),
        })
    }

    fn report(
        &self,
        rank: usize,
        since: Instant,
        limit: Duration,
    ) -> Result<(Report, Duration), String> {
        let (at, line) = self.timed_line(rank, limit)?;
        let report = serde_json::from_str(&line)
            .map_err(|e| format!("invalid report of rank {rank}: {line}: {e}"))?;
        Ok((report, at.saturating_duration_since(since)))
    }

    /// Checks that every survivor ends soon after its report, with the right exit code.
    fn all_end(&mut self, victim: usize, wrong: &mut Vec<String>) {
        let limit = Instant::now() + Duration::from_secs(3);
        for (rank, child) in self.children.iter_mut().enumerate().filter(|(r, _)| *r != victim) {
            loop {
                match child.try_wait() {
                    Ok(Some(end)) if end.code() == Some(REPORTED) => break,
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
            // Fails for ranks that have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Named shared memory of Lockstep on this machine.
fn shared_files() -> Vec<std::ffi::OsString> {
    let Ok(folder) = std::fs::read_dir("/dev/shm") else { return vec![] };
    let mut names: Vec<_> = folder.flatten().map(|entry| entry.file_name()).collect();
    names.retain(|name| name.to_string_lossy().contains("lockstep"));
    names.sort();
    names
}

/// Runs need not be reproducible, so the randomness of the standard hasher suffices.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// A free port below the ephemeral range.
fn free_port() -> u16 {
    loop {
        let port = 10_000 + (random() % 20_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
