//! What other programs take of the cores while something is measured. Reads /proc, and stops nobody.

use lockstep_comm::{Op, World};

/// Above this share of the cores, others disturb.
pub const TOLERATED: f64 = 0.04;

/// Ticks of all cores that somebody worked in, ticks that passed, and those of this process.
#[derive(Clone, Copy)]
pub struct Ticks {
    busy: f64,
    all: f64,
    own: f64,
}

impl Ticks {
    /// Until now; nothing where the system does not tell.
    pub fn now() -> Option<Ticks> {
        let stat = std::fs::read_to_string("/proc/stat").ok()?;
        let cores: Vec<f64> = stat
            .lines()
            .next()?
            .split_whitespace()
            .skip(1)
            .filter_map(|n| n.parse().ok())
            .collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; guests are counted in the first two.
        let all: f64 = cores.iter().take(8).sum();
        let idle = cores.get(3)? + cores.get(4)?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The name in brackets may hold anything.
        let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
        Some(Ticks { busy: all - idle, all, own: ticks(11)? + ticks(12)? })
    }
}

/// Of the cores, what others than these ranks took since then: the same on every rank.
pub fn others(world: &World, since: Option<Ticks>) -> anyhow::Result<f64> {
    let passed = since.zip(Ticks::now()).map_or([0.0, 0.0, 0.0], |(then, now)| {
        [now.own - then.own, now.busy - then.busy, now.all - then.all]
    });
    let mut own = [passed[0]];
    world.all_reduce(&mut own, Op::Sum)?;
    // Everybody has looked at a moment of its own; all go by the first one's.
    let mut share = [((passed[1] - own[0]) / passed[2].max(1.0)).max(0.0)];
    world.broadcast(&mut share, 0)?;
    Ok(share[0])
}
