//! The run's own eye on its pace: at every report all ranks learn each other's times, and all come to the same view
//! of who or what is slow. Takes one exchange of a few numbers per report, and now and then a measurement of the
//! links; never slows a step.

use std::collections::VecDeque;
use std::fmt;

use lockstep_comm::Group;
use lockstep_plan::Plan;
use serde_json::{Value, json};

use crate::gather_texts::gather_texts;
use crate::links::{self, SlowLink};
use crate::straggler::{self, ExpectedWork, REPORTS, Straggler, Times, median, straggler};
use crate::{Error, Rank};

/// Links are measured when ranks wait for this share of their steps, and nobody is slow.
const WAITING: f64 = 0.2;
/// Nothing is said before the ranks have waited for so many seconds: less is not worth a word.
const LOST: f64 = 2.0;
/// After how many reports a warning is repeated, and links are measured again; each time after four times as many.
const AGAIN: usize = 20;

/// What holds the run up.
#[derive(Clone, PartialEq, Debug)]
pub enum Slow {
    /// With the name of its host, where there are several.
    Rank(Straggler, Option<String>),
    Link(SlowLink),
}

/// What all ranks know of a report.
pub struct ReportTimes {
    /// Of each rank.
    pub times: Vec<Times>,
    /// The most memory of any rank.
    pub memory: u64,
    pub slow: Option<Slow>,
    /// Whether it is time to say so.
    pub tell: bool,
}

/// Watches the pace of a run, on every rank of it.
pub struct StragglerMonitor {
    work: Vec<ExpectedWork>,
    /// Names of hosts, by rank; none where there is only one.
    hosts: Vec<String>,
    reports: VecDeque<Vec<Times>>,
    /// Seconds that a rank in the middle has waited.
    lost: f64,
    link: Option<SlowLink>,
    /// Reports until links may be measured, and how many it will be after that.
    measuring: Rarely,
    telling: Rarely,
    /// Who was told of last.
    told: Option<Told>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Rank(usize),
    Link((usize, usize)),
}

impl StragglerMonitor {
    /// All ranks call it.
    pub fn new(plan: &Plan, group: &Group) -> Result<StragglerMonitor, Error> {
        let several = group.hosts().iter().any(|host| *host != 0);
        let hosts = if several { gather_texts(group, &host_name())? } else { vec![] };
        Ok(StragglerMonitor {
            work: straggler::expected_work(plan),
            hosts,
            reports: VecDeque::new(),
            lost: 0.0,
            link: None,
            measuring: Rarely::default(),
            telling: Rarely::default(),
            told: None,
        })
    }

    /// Takes in what this rank did in the `steps` since the last report; none of the first steps of a run, which
    /// fill caches and pools. All ranks call it.
    pub fn look(&mut self, rank: &Rank<'_>, mine: Times, steps: u64) -> Result<ReportTimes, Error> {
        let memory = rank.device.memory().total.peak as f64;
        let mine = [mine.computing, mine.waiting, mine.reading, memory];
        let mut all = vec![0.0; mine.len() * rank.group.size()];
        rank.group.all_gather(&mine, &mut all)?;
        let (all, _) = all.as_chunks::<4>();
        let times: Vec<Times> = all
            .iter()
            .map(|[computing, waiting, reading, _]| Times {
                computing: *computing,
                waiting: *waiting,
                reading: *reading,
            })
            .collect();
        let memory = all.iter().map(|[.., memory]| *memory as u64).max().unwrap_or(0);
        if steps == 0 {
            return Ok(ReportTimes { times, memory, slow: None, tell: false });
        }
        if self.reports.len() == REPORTS {
            self.reports.pop_front();
        }
        self.reports.push_back(times.clone());
        self.lost += steps as f64 * median(times.iter().map(|times| times.waiting));

        // All ranks have the same numbers, so all take the same way from here.
        let slow = match straggler(&self.reports, &self.work) {
            Some(straggler) => {
                let host = self.hosts.get(straggler.rank).cloned();
                Some(Slow::Rank(straggler, host))
            }
            None => self.slow_link(rank)?.map(Slow::Link),
        };
        let tell = self.lost >= LOST && self.is_news(slow.as_ref());
        Ok(ReportTimes { times, memory, slow, tell })
    }

    /// The link that is slow, as far as they have been measured.
    fn slow_link(&mut self, rank: &Rank<'_>) -> Result<Option<SlowLink>, Error> {
        let share = |times: &Times| times.waiting / (times.computing + times.waiting);
        let waiting = median(self.reports.iter().map(|times| median(times.iter().map(share))));
        let worth = waiting >= WAITING && self.lost >= LOST;
        if self.reports.len() < REPORTS || !worth {
            self.link = None;
            return Ok(None);
        }
        if self.measuring.now() {
            let hosts = rank.group.hosts();
            let rounds = links::rounds(&links::neighbours(&rank.groups.mesh, hosts));
            let rates = links::measure(rank.group, rank.group.rank(), &rounds)?;
            let found = links::links(rank.group, &rounds, &rates)?;
            self.link = links::slow_link(&found, rank.group.link_costs().remote);
        }
        Ok(self.link)
    }

    /// At once when it is somebody else, and rarely when it is the same.
    fn is_news(&mut self, slow: Option<&Slow>) -> bool {
        let who = slow.map(|slow| match slow {
            Slow::Rank(straggler, _) => Told::Rank(straggler.rank),
            Slow::Link(link) => Told::Link(link.ranks),
        });
        if who.is_none() {
            return false;
        }
        if who != self.told {
            self.telling = Rarely::default();
        }
        self.told = who;
        self.telling.now()
    }
}

/// At once, and then after more and more reports.
#[derive(Default)]
struct Rarely {
    left: usize,
    times: u32,
}

impl Rarely {
    fn now(&mut self) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.left = AGAIN * 4usize.pow(self.times.min(8)) - 1;
        self.times += 1;
        true
    }
}

impl Slow {
    /// Its name and figures in metrics.jsonl.
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
            Slow::Link(SlowLink { ranks: (one, other), carries, expected, .. }) => (
                "slow_link",
                json!({ "ranks": [one, other], "bytes_per_s": carries, "expected_bytes_per_s": expected }),
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
    use super::Rarely;

    #[test]
    fn at_once_and_then_after_more_and_more() {
        let mut rarely = Rarely::default();
        let said: Vec<usize> = (0..500).filter(|_| rarely.now()).collect();
        assert_eq!(said, [0, 20, 100, 420]);
    }
}
