//! Finds the rank that causes a stalled call: follows the chain of waiting ranks to one that waits for
//! nobody. Pure: takes a snapshot of the board, returns a failure.

use crate::call::Call;
use crate::call::error::{Cause, Failure};
use crate::health::board::{ActiveCall, RankState, RankStatus};

/// A rank without a heartbeat for this long is considered stopped.
const SILENT_MS: u64 = 2_000;

/// A call that has waited too long.
pub(crate) struct StalledCall<'a> {
    /// World rank of the caller.
    pub rank: usize,
    /// World rank that the caller waits for; its own if it waits for its GPU or a library.
    pub peer: usize,
    pub call: &'a Call,
    pub group_name: &'a str,
    pub seconds: f64,
}

impl StalledCall<'_> {
    fn failure(&self, culprit: usize, cause: Cause, why: &str) -> Failure {
        let StalledCall { rank, call, group_name, seconds, .. } = self;
        let text = format!(
            "no progress for {seconds:.1} s in {call} of group {group_name} (seen by rank {rank}): {why}"
        );
        Failure { culprit, cause, text }
    }
}

/// The failure behind a stalled call.
pub(crate) fn blame(statuses: &[RankStatus], stalled: &StalledCall) -> Failure {
    let call = stalled.call;
    if stalled.peer == stalled.rank {
        let why = format!(
            "rank {} waits for its own GPU or the library of its engine, which make no progress",
            stalled.rank
        );
        return stalled.failure(stalled.rank, Cause::Late, &why);
    }
    let mut suspect = stalled.peer;
    let mut awaited = (call.group, call.sequence, call.kind);
    let mut path = vec![stalled.rank];
    while !path.contains(&suspect) || is_silent(&statuses[suspect]) {
        let status = &statuses[suspect];
        if is_silent(status) {
            let why = format!(
                "no heartbeat from rank {suspect} for {:.1} s: it is stopped, or its host is overloaded",
                status.silent_ms as f64 / 1000.0
            );
            return stalled.failure(suspect, Cause::Silent, &why);
        }
        path.push(suspect);
        // The awaited call itself, or else a call that keeps the suspect from reaching it.
        let here = status.calls.iter().find(|a| (a.words[3], a.words[2]) == (awaited.0, awaited.1));
        let next = here.or_else(|| status.calls.iter().find(|a| a.waiting_for.is_some()));
        if let Some(why) = next.and_then(|call| unconnected(statuses, suspect, call)) {
            return stalled.failure(why.0, Cause::Late, &why.1);
        }
        match next.and_then(|a| Some((a.waiting_for?, a.words, a.call()?.kind))) {
            Some((next_peer, words, kind)) if next_peer < statuses.len() => {
                suspect = next_peer;
                awaited = (words[3], words[2], kind);
            }
            _ => {
                let name = format!("{} #{}", awaited.2.name(), awaited.1);
                let why = match (here, status.calls.first().and_then(|a| a.call())) {
                    (Some(_), _) => format!("rank {suspect} is in the call but makes no progress"),
                    (None, Some(other)) => {
                        format!("rank {suspect} has not reached {name}; it is in {other}")
                    }
                    (None, None) => {
                        format!("rank {suspect} has not reached {name}; it is not in a call")
                    }
                };
                return stalled.failure(suspect, Cause::Late, &why);
            }
        }
    }
    stalled.failure(stalled.peer, Cause::Late, &deadlock(statuses, &path))
}

/// The rank that `rank` cannot reach in this call, and the explanation. A rank that is connected to needs to do
/// nothing, so two ranks that wait for the same connection are not a deadlock.
fn unconnected(statuses: &[RankStatus], rank: usize, call: &ActiveCall) -> Option<(usize, String)> {
    let peer = call.waiting_for.filter(|_| call.connecting)?;
    let why = format!(
        "rank {rank} cannot connect to rank {peer}; check the network and the firewalls between their hosts"
    );
    statuses.get(peer).filter(|status| !is_silent(status)).map(|_| (peer, why))
}

fn is_silent(status: &RankStatus) -> bool {
    status.state == RankState::Running && status.silent_ms >= SILENT_MS
}

/// All ranks of the path wait for another one of them: their calls are in incompatible orders.
fn deadlock(statuses: &[RankStatus], path: &[usize]) -> String {
    let ranks: Vec<String> = path.iter().map(|r| r.to_string()).collect();
    let (last, first) = ranks.split_last().expect("the path starts with the caller");
    let calls: Vec<String> = path
        .iter()
        .map(|&r| match statuses[r].calls.first().and_then(|a| a.call()) {
            Some(call) => format!("rank {r} is in {call}"),
            None => format!("rank {r} is not in a call"),
        })
        .collect();
    format!(
        "deadlock: ranks {} and {last} wait for each other: {}",
        first.join(", "),
        calls.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Algo;
    use lockstep_types::Collective;

    fn call(group: u64, sequence: u64) -> Call {
        Call {
            kind: Collective::Barrier,
            algo: Algo::Ring,
            dtype: None,
            op: None,
            root: None,
            count: 0,
            sequence,
            group,
        }
    }

    fn running(calls: &[(Call, Option<usize>)]) -> RankStatus {
        let active = |(call, waiting_for): &(Call, Option<usize>)| ActiveCall {
            words: call.words(),
            waiting_for: *waiting_for,
            connecting: false,
        };
        let calls = calls.iter().map(active).collect();
        RankStatus { state: RankState::Running, silent_ms: 0, calls }
    }

    /// The failure found when rank 0 has waited for rank 1 in `call`.
    fn blame_stalled(statuses: &[RankStatus], call: &Call) -> Failure {
        let stalled = StalledCall { rank: 0, peer: 1, call, group_name: "world", seconds: 30.0 };
        blame(statuses, &stalled)
    }

    #[test]
    fn follows_the_chain_to_the_rank_that_waits_for_nobody() {
        let c = call(1, 5);
        let statuses = [
            running(&[(c, Some(1))]),
            running(&[(c, Some(2))]),
            running(&[(c, Some(3))]),
            running(&[]),
        ];
        let failure = blame_stalled(&statuses, &c);
        assert_eq!((failure.culprit, failure.cause), (3, Cause::Late));
        assert!(failure.text.contains("rank 3 has not reached barrier #5; it is not in a call"));
    }

    #[test]
    fn a_peer_blocked_in_another_group_is_not_blamed() {
        let (ours, theirs) = (call(1, 5), call(2, 9));
        let statuses =
            [running(&[(ours, Some(1))]), running(&[(theirs, Some(2))]), running(&[(ours, None)])];
        let failure = blame_stalled(&statuses, &ours);
        assert_eq!(failure.culprit, 2);
    }

    #[test]
    fn a_stopped_rank_is_blamed_even_if_it_seems_to_wait() {
        let c = call(1, 5);
        let mut statuses = [running(&[(c, Some(1))]), running(&[(c, Some(0))])];
        statuses[1].silent_ms = 9_000;
        let failure = blame_stalled(&statuses, &c);
        assert_eq!((failure.culprit, failure.cause), (1, Cause::Silent));
    }

    #[test]
    fn a_connection_that_does_not_form_is_not_called_a_deadlock() {
        let c = call(1, 5);
        // Rank 2 waits for rank 1, which waits for the connection that rank 0 cannot open.
        let mut statuses =
            [running(&[(c, Some(1))]), running(&[(c, Some(0))]), running(&[(c, Some(1))])];
        statuses[0].calls[0].connecting = true;
        for (rank, peer) in [(1, 0), (2, 1)] {
            let stalled = StalledCall { rank, peer, call: &c, group_name: "world", seconds: 30.0 };
            let failure = blame(&statuses, &stalled);
            assert_eq!((failure.culprit, failure.cause), (1, Cause::Late));
            assert!(failure.text.contains("rank 0 cannot connect to rank 1"), "{}", failure.text);
        }
        statuses[1].silent_ms = 9_000;
        let stalled =
            StalledCall { rank: 2, peer: 0, call: &c, group_name: "world", seconds: 30.0 };
        assert_eq!(blame(&statuses, &stalled).cause, Cause::Silent);
    }

    #[test]
    fn a_rank_that_waits_for_its_own_gpu_is_no_deadlock() {
        let c = call(1, 5);
        let statuses = [running(&[(c, None)]), running(&[(c, None)])];
        let stalled =
            StalledCall { rank: 1, peer: 1, call: &c, group_name: "world", seconds: 30.0 };
        let failure = blame(&statuses, &stalled);
        assert_eq!((failure.culprit, failure.cause), (1, Cause::Late));
        assert!(failure.text.contains("rank 1 waits for its own GPU"), "{}", failure.text);
    }

    #[test]
    fn a_deadlock_is_reported_with_all_its_calls() {
        let (a, b) = (call(1, 5), call(2, 7));
        let statuses = [running(&[(a, Some(1))]), running(&[(b, Some(0))])];
        let failure = blame_stalled(&statuses, &a);
        assert!(
            failure.text.contains("deadlock: ranks 0 and 1 wait for each other"),
            "{}",
            failure.text
        );
        assert!(failure.text.contains("barrier #5") && failure.text.contains("barrier #7"));
    }
}
