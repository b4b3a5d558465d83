//! CPU time used by other programs during a measurement, from /proc.

use lockstep_comm::{Op, World};

/// Maximum fraction of the cores that other programs may use during a valid measurement.
pub const MAX_OTHERS: f64 = 0.04;

/// CPU time in clock ticks: of all programs, in total (including idle time), and of this process.
#[derive(Clone, Copy)]
pub struct Ticks {
    busy: f64,
    all: f64,
    own: f64,
}

impl Ticks {
    /// The current values. None if /proc is not available.
    pub fn now() -> Option<Ticks> {
        let stat = std::fs::read_to_string("/proc/stat").ok()?;
        let cores: Vec<f64> = stat
            .lines()
            .next()?
            .split_whitespace()
            .skip(1)
            .filter_map(|n| n.parse().ok())
            .collect();
        // user, nice, system, idle, iowait, irq, softirq, steal; guest time is included in the first two.
        let all: f64 = cores.iter().take(8).sum();
        let idle = cores.get(3)? + cores.get(4)?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The process name in parentheses may contain anything.
        let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
        Some(Ticks { busy: all - idle, all, own: ticks(11)? + ticks(12)? })
    }
}

/// Fraction of the cores that other programs used since then. The same on all ranks.
pub fn others(world: &World, since: Option<Ticks>) -> anyhow::Result<f64> {
    let elapsed = since.zip(Ticks::now()).map_or([0.0, 0.0, 0.0], |(then, now)| {
        [now.own - then.own, now.busy - then.busy, now.all - then.all]
    });
    let mut own = [elapsed[0]];
    world.all_reduce(&mut own, Op::Sum)?;
    // Ranks read /proc at different times; all use the value of rank 0.
    let mut share = [((elapsed[1] - own[0]) / elapsed[2].max(1.0)).max(0.0)];
    world.broadcast(&mut share, 0)?;
    Ok(share[0])
}
