//! Straggler detection. At every report the ranks exchange their step times and agree on which rank or link is slow.
//! Costs one small all-gather per report and, rarely, a measurement of the links; does not slow down steps.

use std::collections::VecDeque;
use std::fmt;

use lockstep_comm::Group;
use lockstep_plan::Plan;
use serde_json::{Value, json};

use crate::gather_texts::gather_texts;
use crate::links::{self, SlowLink};
use crate::straggler::{self, ExpectedWork, REPORTS, Straggler, Times, median, straggler};
use crate::{Error, Rank};

/// Links are measured if ranks wait for at least this fraction of a step and no rank is slow.
const MIN_WAITING: f64 = 0.2;
/// Minimum time lost to waiting, in seconds, before a straggler warning is printed.
const MIN_LOST_SECONDS: f64 = 2.0;
/// Reports until a warning or a measurement is repeated for the first time; the interval grows fourfold each time.
const FIRST_INTERVAL: usize = 20;

/// Cause of a slow run.
#[derive(Clone, PartialEq, Debug)]
pub enum Slow {
    /// A straggler, with its host name if there are several hosts.
    Rank(Straggler, Option<String>),
    Link(SlowLink),
}

/// Times and memory of all ranks at a report; the same on all ranks.
pub struct ReportTimes {
    /// Times of each rank.
    pub times: Vec<Times>,
    /// Peak memory of the rank that uses most.
    pub memory: u64,
    /// Peak memory of each rank.
    pub memories: Vec<u64>,
    pub slow: Option<Slow>,
    /// A warning about `slow` is due.
    pub warn: bool,
}

/// Detects stragglers and slow links. Every rank has one.
pub struct StragglerMonitor {
    work: Vec<ExpectedWork>,
    /// Host name of each rank; empty if there is only one host.
    hosts: Vec<String>,
    reports: VecDeque<Vec<Times>>,
    /// Seconds that the median rank has waited.
    lost: f64,
    link: Option<SlowLink>,
    measuring: Backoff,
    warning: Backoff,
    /// Cause of the last warning.
    last_cause: Option<Cause>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    Rank(usize),
    Link((usize, usize)),
}

impl StragglerMonitor {
    /// Collective.
    pub fn new(plan: &Plan, group: &Group) -> Result<StragglerMonitor, Error> {
        let several = group.hosts().iter().any(|host| *host != 0);
        let hosts = if several { gather_texts(group, &host_name())? } else { vec![] };
        Ok(StragglerMonitor {
            work: straggler::expected_work(plan),
            hosts,
            reports: VecDeque::new(),
            lost: 0.0,
            link: None,
            measuring: Backoff::default(),
            warning: Backoff::default(),
            last_cause: None,
        })
    }

    /// Adds the times of this rank over the last `steps` steps. With 0 steps, the times are shared but not used for
    /// detection. `memory` is this rank's, in bytes. Collective.
    pub fn report(
        &mut self,
        rank: &Rank<'_>,
        mine: Times,
        memory: u64,
        steps: u64,
    ) -> Result<ReportTimes, Error> {
        let mine =
            [mine.computing, mine.waiting, mine.reading, mine.pipe, mine.queued, memory as f64];
        let mut all = vec![0.0; mine.len() * rank.group.size()];
        rank.group.all_gather(&mine, &mut all)?;
        let (all, _) = all.as_chunks::<6>();
        let times: Vec<Times> = all
            .iter()
            .map(|[computing, waiting, reading, pipe, queued, _]| Times {
                computing: *computing,
                waiting: *waiting,
                reading: *reading,
                pipe: *pipe,
                queued: *queued,
            })
            .collect();
        let memories: Vec<u64> = all.iter().map(|[.., memory]| *memory as u64).collect();
        let memory = memories.iter().copied().max().unwrap_or(0);
        if steps == 0 {
            return Ok(ReportTimes { times, memory, memories, slow: None, warn: false });
        }
        if self.reports.len() == REPORTS {
            self.reports.pop_front();
        }
        self.reports.push_back(times.clone());
        self.lost += steps as f64 * median(times.iter().map(|times| times.waiting));

        // All ranks have the same numbers and take the same branches from here on.
        let slow = match straggler(&self.reports, &self.work) {
            Some(straggler) => {
                let host = self.hosts.get(straggler.rank).cloned();
                Some(Slow::Rank(straggler, host))
            }
            None => self.slow_link(rank)?.map(Slow::Link),
        };
        let warn = self.lost >= MIN_LOST_SECONDS && self.is_warning_due(slow.as_ref());
        Ok(ReportTimes { times, memory, memories, slow, warn })
    }

    /// Slow link of the last measurement. Measures the links if ranks wait and a measurement is due.
    fn slow_link(&mut self, rank: &Rank<'_>) -> Result<Option<SlowLink>, Error> {
        let share = |times: &Times| times.waiting / (times.computing + times.waiting);
        let waiting = median(self.reports.iter().map(|times| median(times.iter().map(share))));
        let waits = waiting >= MIN_WAITING && self.lost >= MIN_LOST_SECONDS;
        if self.reports.len() < REPORTS || !waits {
            self.link = None;
            return Ok(None);
        }
        if self.measuring.is_due() {
            let hosts = rank.group.hosts();
            let rounds = links::rounds(&links::neighbors(&rank.groups.mesh, hosts));
            let rates = links::measure(rank.group, rank.group.rank(), &rounds)?;
            let found = links::links(rank.group, &rounds, &rates)?;
            self.link = links::slow_link(&found, rank.group.link_costs().remote);
        }
        Ok(self.link)
    }

    /// A new cause is reported immediately, the same one at growing intervals.
    fn is_warning_due(&mut self, slow: Option<&Slow>) -> bool {
        let cause = slow.map(|slow| match slow {
            Slow::Rank(straggler, _) => Cause::Rank(straggler.rank),
            Slow::Link(link) => Cause::Link(link.ranks),
        });
        if cause.is_none() {
            return false;
        }
        if cause != self.last_cause {
            self.warning = Backoff::default();
        }
        self.last_cause = cause;
        self.warning.is_due()
    }
}

/// Due at the first call, then at growing intervals.
#[derive(Default)]
struct Backoff {
    left: usize,
    times: u32,
}

impl Backoff {
    fn is_due(&mut self) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.left = FIRST_INTERVAL * 4usize.pow(self.times.min(8)) - 1;
        self.times += 1;
        true
    }
}

impl Slow {
    /// Key and value in metrics.jsonl.
    pub fn metric(&self) -> (&'static str, Value) {
        match self {
            Slow::Rank(straggler, host) => {
                let Straggler { rank, computing, others, reading, waited, .. } = straggler;
                let mut value = json!({
                    "rank": rank, "computing_s": computing, "others_s": others, "reading_s": reading,
                    "waited": waited,
                });
                if let Some(host) = host {
                    value["host"] = host.as_str().into();
                }
                ("straggler", value)
            }
            Slow::Link(SlowLink { ranks: (one, other), bandwidth, expected, .. }) => (
                "slow_link",
                json!({ "ranks": [one, other], "bytes_per_s": bandwidth, "expected_bytes_per_s": expected }),
            ),
        }
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Slow::Rank(straggler, Some(host)) => {
                write!(f, "rank {} (host {host}) {straggler}", straggler.rank)
            }
            Slow::Rank(straggler, None) => write!(f, "rank {} {straggler}", straggler.rank),
            Slow::Link(link) => link.fmt(f),
        }
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_string()
}

#[cfg(test)]
mod tests {
    use super::Backoff;

    #[test]
    fn intervals_grow_fourfold() {
        let mut backoff = Backoff::default();
        let due: Vec<usize> = (0..500).filter(|_| backoff.is_due()).collect();
        assert_eq!(due, [0, 20, 100, 420]);
    }
}
