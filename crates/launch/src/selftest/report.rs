//! Judges the facts of all ranks: a verdict per host, each problem with what to do. Pure.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::Facts;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// A run works, but is slow or may break.
    Warning,
    Failed,
}

/// One check of a host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    /// The figures, and what to do if it is not ok.
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostReport {
    pub node: usize,
    pub host: String,
    pub ranks: usize,
    pub verdict: Status,
    pub checks: Vec<Check>,
}

/// Verdicts of all hosts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SelfTestReport {
    pub verdict: Status,
    pub hosts: Vec<HostReport>,
}

/// Below this fraction of what the network cards promise, a link is slow, or broken.
const SLOW_LINK: [f64; 2] = [0.5, 0.05];
/// Below this fraction of the median of all hosts, a host is slow, or broken.
const SLOW_HOST: [f64; 2] = [0.7, 0.25];
/// Seconds of clock skew: timelines and logs of hosts do not match, and deadlines are wrong.
const CLOCK_SKEW: [f64; 2] = [0.1, 10.0];
/// Bytes per second written to storage: a checkpoint of 100 GB takes more than 17 minutes.
const SLOW_STORAGE: f64 = 1e8;
/// Seconds until all ranks are connected.
const SLOW_RENDEZVOUS: f64 = 60.0;

pub(super) fn judge(facts: &[Facts]) -> SelfTestReport {
    let mut nodes: BTreeMap<usize, Vec<&Facts>> = BTreeMap::new();
    facts.iter().for_each(|one| nodes.entry(one.node).or_default().push(one));
    let reference = &facts[0];
    let of_hosts = |value: &dyn Fn(&Facts) -> Option<f64>| median(facts.iter().filter_map(value));
    let inside = of_hosts(&|one| one.links.inside.map(|link| link[0]));
    let hosts: Vec<HostReport> = nodes
        .into_iter()
        .map(|(node, ranks)| {
            let mut checks =
                vec![versions(&ranks, reference), problems(&ranks), rendezvous(&ranks)];
            checks.extend(link_inside(&ranks, inside));
            checks.extend(link_between(&ranks));
            checks.extend([sums(&ranks), clock(&ranks)]);
            checks.extend(storage(&ranks));
            HostReport {
                node,
                host: ranks[0].host.clone(),
                ranks: ranks.len(),
                verdict: worst(checks.iter().map(|check| check.status)),
                checks,
            }
        })
        .collect();
    SelfTestReport { verdict: worst(hosts.iter().map(|host| host.verdict)), hosts }
}

fn check(name: &'static str, status: Status, text: impl Into<String>) -> Check {
    Check { name, status, text: text.into() }
}

/// All versions and the number of GPUs are those of rank 0.
fn versions(ranks: &[&Facts], reference: &Facts) -> Check {
    let mut different = Vec::new();
    let mine = ranks[0];
    let keys: std::collections::BTreeSet<&String> =
        reference.versions.keys().chain(mine.versions.keys()).collect();
    for key in keys {
        let of = |facts: &Facts| facts.versions.get(key).cloned().unwrap_or("missing".into());
        // Ranks of one host may load different libraries.
        if let Some(other) = ranks.iter().find(|one| of(one) != of(reference)) {
            different.push(format!(
                "{key} is {}, but {} on {}",
                of(other),
                of(reference),
                reference.host
            ));
        }
    }
    if mine.gpus != reference.gpus {
        different.push(format!("{} GPUs, but {} on {}", mine.gpus, reference.gpus, reference.host));
    }
    match different.is_empty() {
        true => {
            let all: Vec<String> =
                mine.versions.iter().map(|(key, value)| format!("{key} {value}")).collect();
            check("versions", Status::Ok, all.join(", "))
        }
        false => {
            let text = format!("{}; install the same versions on all hosts", different.join("; "));
            check("versions", Status::Failed, text)
        }
    }
}

fn problems(ranks: &[&Facts]) -> Check {
    let mut all: Vec<&str> =
        ranks.iter().flat_map(|one| one.problems.iter().map(String::as_str)).collect();
    all.sort_unstable();
    all.dedup();
    match all.is_empty() {
        true => check("devices", Status::Ok, format!("{} GPUs", ranks[0].gpus)),
        false => check("devices", Status::Failed, all.join("; ")),
    }
}

fn rendezvous(ranks: &[&Facts]) -> Check {
    let seconds = ranks.iter().map(|one| one.rendezvous).fold(0.0, f64::max);
    let text = format!("connected after {seconds:.1} s");
    match seconds > SLOW_RENDEZVOUS {
        false => check("rendezvous", Status::Ok, text),
        true => check(
            "rendezvous",
            Status::Warning,
            format!("{text}; start all hosts at the same time, and check name resolution"),
        ),
    }
}

fn link_inside(ranks: &[&Facts], median: Option<f64>) -> Option<Check> {
    let [rate, latency] = ranks.iter().find_map(|one| one.links.inside)?;
    let text = format!("{:.2} GB/s, {:.1} µs between ranks", rate * 1e-9, latency * 1e6);
    let usual = median.unwrap_or(rate);
    let status = below(rate / usual, SLOW_HOST);
    Some(match status {
        Status::Ok => check("link inside the host", status, text),
        _ => check(
            "link inside the host",
            status,
            format!(
                "{text}, but {:.2} GB/s on other hosts; stop other programs, and check for throttling and memory errors",
                usual * 1e-9
            ),
        ),
    })
}

fn link_between(ranks: &[&Facts]) -> Option<Check> {
    let [rate, latency] = ranks.iter().find_map(|one| one.links.between)?;
    let text = format!("{:.2} GB/s, {:.1} µs to the next host", rate * 1e-9, latency * 1e6);
    let Some(promised) = ranks[0].network_gbs else {
        let text = format!("{text}; the system does not tell what its network cards promise");
        return Some(check("link between hosts", Status::Ok, text));
    };
    let text = format!("{text}, {promised:.2} GB/s promised by the network cards");
    let status = below(rate * 1e-9 / promised, SLOW_LINK);
    Some(match status {
        Status::Ok => check("link between hosts", status, text),
        _ => check(
            "link between hosts",
            status,
            format!(
                "{text}; check which interface the address belongs to (--master-addr, --bind), cables and MTU"
            ),
        ),
    })
}

fn sums(ranks: &[&Facts]) -> Check {
    match ranks.iter().map(|one| one.wrong).sum::<u64>() {
        0 => check("all-reduce", Status::Ok, "all results are correct"),
        wrong => check(
            "all-reduce",
            Status::Failed,
            format!("{wrong} wrong elements; take this host out and test its memory and network"),
        ),
    }
}

fn clock(ranks: &[&Facts]) -> Check {
    let [ahead, error] = ranks[0].clock;
    let text = format!("{:+.1} ms (± {:.1} ms) relative to rank 0", 1e3 * ahead, 1e3 * error);
    let skew = ahead.abs() - error;
    let status = above(skew, CLOCK_SKEW);
    match status {
        Status::Ok => check("clock", status, text),
        _ => check("clock", status, format!("{text}; synchronize it with NTP or chrony")),
    }
}

fn storage(ranks: &[&Facts]) -> Vec<Check> {
    let mut found = ranks.iter().map(|one| &one.storage);
    let Some(storage) = found.find(|one| one.error.is_some() || one.written.is_some()) else {
        return Vec::new();
    };
    let mut checks = Vec::new();
    if let Some(error) = &storage.error {
        let text = format!("{error}; choose a folder that exists and can be written with --runs");
        checks.push(check("storage", Status::Failed, text));
    }
    if let (Some(written), Some(read)) = (storage.written, storage.read) {
        let text = format!("{:.0} MB/s written, {:.0} MB/s read", written * 1e-6, read * 1e-6);
        let status = below(written, [SLOW_STORAGE, 0.0]);
        checks.push(match status {
            Status::Ok => check("storage", status, text),
            _ => check("storage", status, format!("{text}; use faster storage for checkpoints")),
        });
    }
    if let Some(shared) = storage.shared {
        checks.push(match shared {
            true => check("shared folder", Status::Ok, "this host sees the files of rank 0"),
            false => check(
                "shared folder",
                Status::Failed,
                "this host does not see the files of rank 0; use a folder on shared storage for --runs",
            ),
        });
    }
    checks
}

/// Judges a value of which more is better.
fn below(value: f64, [warning, failure]: [f64; 2]) -> Status {
    match value {
        value if value < failure => Status::Failed,
        value if value < warning => Status::Warning,
        _ => Status::Ok,
    }
}

/// Judges a value of which less is better.
fn above(value: f64, [warning, failure]: [f64; 2]) -> Status {
    match value {
        value if value > failure => Status::Failed,
        value if value > warning => Status::Warning,
        _ => Status::Ok,
    }
}

fn worst(all: impl Iterator<Item = Status>) -> Status {
    all.max().unwrap_or(Status::Ok)
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut all: Vec<f64> = values.collect();
    all.sort_by(f64::total_cmp);
    (!all.is_empty()).then(|| all[all.len() / 2])
}

impl Status {
    fn name(self) -> &'static str {
        match self {
            Status::Ok => "ok",
            Status::Warning => "warning",
            Status::Failed => "FAILED",
        }
    }
}

impl fmt::Display for SelfTestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for host in &self.hosts {
            let HostReport { node, host, ranks, verdict, checks } = host;
            writeln!(f, "host {node} ({host}), {ranks} rank(s): {}", verdict.name())?;
            for Check { name, status, text } in checks {
                writeln!(f, "  {:<8} {name}: {text}", status.name())?;
            }
        }
        let failed: Vec<&str> = self
            .hosts
            .iter()
            .filter(|host| host.verdict == Status::Failed)
            .map(|host| host.host.as_str())
            .collect();
        match self.verdict {
            Status::Ok => write!(f, "all hosts are ready"),
            Status::Warning => write!(f, "all hosts work; see the warnings"),
            Status::Failed => write!(f, "not ready: {}", failed.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(node: usize) -> Facts {
        Facts {
            node,
            host: format!("h{node}"),
            versions: BTreeMap::from([
                ("lockstep".into(), "1".into()),
                ("NCCL".into(), "2.27".into()),
            ]),
            network_gbs: Some(50.0),
            links: super::super::LinkRates {
                inside: Some([8e9, 1e-6]),
                between: Some([40e9, 5e-6]),
                ..Default::default()
            },
            storage: super::super::storage::Storage {
                written: Some(1e9),
                read: Some(1e9),
                shared: Some(true),
                error: None,
            },
            ..Facts::default()
        }
    }

    /// The verdict of the second of three hosts after a change, and the texts of what is wrong.
    fn judged(change: impl Fn(&mut Facts)) -> (Status, String) {
        let mut all = vec![host(0), host(1), host(2)];
        change(&mut all[1]);
        let report = judge(&all);
        let bad = |check: &&Check| check.status != Status::Ok;
        let texts: Vec<String> = report.hosts[1]
            .checks
            .iter()
            .filter(bad)
            .map(|check| format!("{}: {}", check.name, check.text))
            .collect();
        let mut others = report.hosts.iter().filter(|host| host.node != 1);
        assert!(others.all(|host| host.verdict == Status::Ok), "{report}");
        (report.verdict, texts.join("\n"))
    }

    #[test]
    fn a_bad_host_is_named_with_what_to_do() {
        use Status::{Failed, Warning};
        assert_eq!(judged(|_| {}), (Status::Ok, String::new()));
        type Change<'a> = &'a dyn Fn(&mut Facts);
        let cases: [(Change<'_>, Status, &str); 9] = [
            (
                &|facts| drop(facts.versions.insert("NCCL".into(), "2.21".into())),
                Failed,
                "versions: NCCL is 2.21, but 2.27 on h0; install the same",
            ),
            (&|facts| facts.gpus = 7, Failed, "versions: 7 GPUs, but 0 on h0"),
            (&|facts| facts.problems.push("no driver".into()), Failed, "devices: no driver"),
            (&|facts| facts.wrong = 3, Failed, "all-reduce: 3 wrong elements; take"),
            (&|facts| facts.clock = [-0.5, 0.001], Warning, "clock: -500.0 ms"),
            (&|facts| facts.storage.shared = Some(false), Failed, "shared folder: this host"),
            (&|facts| facts.storage.written = Some(5e7), Warning, "storage: 50 MB/s written"),
            (&|facts| facts.links.between = Some([1e9, 1e-3]), Failed, "link between hosts: 1.00"),
            (
                &|facts| facts.links.inside = Some([5e9, 1e-6]),
                Warning,
                "link inside the host: 5.00",
            ),
        ];
        for (change, verdict, text) in cases {
            let (found, texts) = judged(change);
            assert_eq!(found, verdict, "{texts}");
            assert!(texts.starts_with(text), "{texts}");
        }
    }
}
