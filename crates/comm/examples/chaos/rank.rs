//! One rank of a chaos run: makes random calls and checks every result until one fails; then prints one line
//! of JSON with the rank that it blames.

use lockstep_comm::{Error, Group, Identity, LinkCosts, LocalLinks, Op, Options, World};
use std::time::Duration;

/// The identity of the rank, as JSON.
pub const IDENTITY: &str = "CHAOS_IDENTITY";
pub const ENGINE: &str = "CHAOS_ENGINE";
pub const HEARTBEAT_MS: &str = "CHAOS_HEARTBEAT_MS";
/// Printed when the world has started.
pub const JOINED: &str = "joined";
/// Exit code of a rank that has printed its report.
pub const REPORTED: i32 = 3;

/// Report of a rank whose world broke.
#[derive(serde::Serialize, serde::Deserialize)]
pub struct Report {
    pub rank: usize,
    pub culprit: Option<usize>,
    pub cause: Option<lockstep_comm::Cause>,
    /// Time since the rank joined.
    pub after_ms: u64,
    pub error: String,
}

pub fn run() -> i32 {
    let identity = std::env::var(IDENTITY).expect("the driver sets it");
    let identity: Identity = serde_json::from_str(&identity).expect("the driver's JSON");
    let joined = World::join(&identity, &options()).map(|world| {
        println!("{JOINED}");
        (world, std::time::Instant::now())
    });
    let (error, since) = match joined {
        Ok((world, since)) => match call_at_random(&world) {
            Ok(never) => match never {},
            Err(error) => (error, since),
        },
        Err(error) => (error, std::time::Instant::now()),
    };
    let report = Report {
        rank: identity.rank,
        culprit: error.culprit(),
        cause: error.cause(),
        after_ms: since.elapsed().as_millis() as u64,
        error: error.to_string(),
    };
    println!("{}", serde_json::to_string(&report).expect("plain data"));
    REPORTED
}

fn options() -> Options {
    let set = |name: &str| std::env::var(name).ok();
    let heartbeat = set(HEARTBEAT_MS).and_then(|ms| ms.parse().ok()).unwrap_or(5000);
    let local = match set(ENGINE).as_deref() {
        Some("tcp") => LocalLinks::Tcp,
        _ => LocalLinks::SharedMemory,
    };
    Options {
        heartbeat: Duration::from_millis(heartbeat),
        link_costs: Some(LinkCosts::default()),
        local,
        ..Options::default()
    }
}

/// Equal on all ranks, so that they make the same calls.
struct Random(u64);

impl Random {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % below
    }
}

enum Never {}

fn call_at_random(world: &World) -> Result<Never, Error> {
    let mut random = Random(7);
    let mut halves = split(world, &mut random)?;
    loop {
        // Members of different halves draw the same numbers, so they make the same calls.
        let len = [0, 1, 100, 5_000, 60_000][random.below(5) as usize] + random.below(7) as usize;
        let root = random.below(world.size() as u64) as usize;
        let group = if random.below(3) == 0 { &halves } else { world.group() };
        let root = root % group.size();
        match random.below(8) {
            0 => all_reduce(group, len)?,
            1 => broadcast(group, len, root)?,
            2 => exchange(group, len / 10)?,
            3 => started(world, &halves, len)?,
            4 => send_to_next(group, len)?,
            5 => gather(group, len, root)?,
            6 => group.barrier()?,
            _ if random.below(10) == 0 => halves = split(world, &mut random)?,
            _ => {}
        }
    }
}

/// Splits the world into two groups at a random rank.
fn split(world: &World, random: &mut Random) -> Result<Group, Error> {
    let first = 1 + random.below(world.size() as u64 - 1) as usize;
    let color = i64::from(world.rank() < first);
    Ok(world.split(Some(color), 0, "half")?.expect("all ranks have a color"))
}

fn all_reduce(group: &Group, len: usize) -> Result<(), Error> {
    let mut buffer = vec![group.rank() as f32; len];
    group.all_reduce(&mut buffer, Op::Sum)?;
    check(&buffer, sum_of_ranks(group));
    Ok(())
}

fn broadcast(group: &Group, len: usize, root: usize) -> Result<(), Error> {
    let mut buffer = vec![group.rank() as f32; len];
    group.broadcast(&mut buffer, root)?;
    check(&buffer, root as f32);
    Ok(())
}

fn exchange(group: &Group, len: usize) -> Result<(), Error> {
    let input = vec![group.rank() as f32; len * group.size()];
    let mut output = vec![-1.0; input.len()];
    group.all_to_all(&input, &mut output)?;
    for (from, piece) in output.chunks(len.max(1)).enumerate() {
        check(piece, from as f32);
    }
    Ok(())
}

/// Concurrent calls of two groups.
fn started(world: &World, halves: &Group, len: usize) -> Result<(), Error> {
    let a = world.start_all_reduce(vec![world.rank() as f32; len], Op::Sum);
    let b = halves.start_all_reduce(vec![halves.rank() as f32; len], Op::Sum);
    check(&a.wait()?, sum_of_ranks(world));
    check(&b.wait()?, sum_of_ranks(halves));
    Ok(())
}

/// A message to the next member and one from the previous.
fn send_to_next(group: &Group, len: usize) -> Result<(), Error> {
    let (me, n) = (group.rank(), group.size());
    let sent = group.start_send(vec![me as f32; len], (me + 1) % n);
    let mut buffer = vec![-1.0f32; len];
    group.receive(&mut buffer, (me + n - 1) % n)?;
    sent.wait()?;
    check(&buffer, ((me + n - 1) % n) as f32);
    Ok(())
}

fn gather(group: &Group, len: usize, root: usize) -> Result<(), Error> {
    let mut output = vec![-1.0f32; if group.rank() == root { len * group.size() } else { 0 }];
    group.gather(&vec![group.rank() as f32; len], &mut output, root)?;
    for (from, piece) in output.chunks(len.max(1)).enumerate() {
        check(piece, from as f32);
    }
    Ok(())
}

fn sum_of_ranks(group: &Group) -> f32 {
    (group.size() * (group.size() - 1) / 2) as f32
}

/// Wrong data ends the rank with a different exit code than a report.
fn check(buffer: &[f32], want: f32) {
    assert!(buffer.iter().all(|x| *x == want), "corrupt data: expected {want} everywhere");
}
