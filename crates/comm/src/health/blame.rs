//! Who is to blame when a call has waited too long: follows the chain of who waits for whom to the
//! rank that waits for nobody. Pure: takes what the board shows, returns a verdict.

use crate::call::Call;
use crate::call::error::{Cause, Failure};
use crate::health::board::{Sight, State};

/// A rank that gave no sign of life for this long is taken to be stopped.
const SILENT_MS: u64 = 2_000;

/// The failure behind a wait of `seconds` by `waiter` for `peer` in `call`.
/// `group_name` is how the group is called in messages.
pub(crate) fn blame(
    sights: &[Sight],
    waiter: usize,
    peer: usize,
    call: &Call,
    group_name: &str,
    seconds: f64,
) -> Failure {
    let mut suspect = peer;
    let mut awaited = (call.group, call.sequence, call.kind);
    let mut path = vec![waiter];
    loop {
        let sight = &sights[suspect];
        if sight.state == State::Running && sight.silent_ms >= SILENT_MS {
            return verdict(
                suspect,
                Cause::Silent,
                waiter,
                call,
                group_name,
                seconds,
                &format!(
                    "rank {suspect} has given no sign of life for {:.1} s: it is stopped, or its host is overloaded",
                    sight.silent_ms as f64 / 1000.0
                ),
            );
        }
        if path.contains(&suspect) {
            break;
        }
        path.push(suspect);
        // In the awaited call itself, or else in whatever keeps it from getting there.
        let here = sight.doing.iter().find(|d| (d.words[3], d.words[2]) == (awaited.0, awaited.1));
        let next = here.or_else(|| sight.doing.iter().find(|d| d.waiting_for.is_some()));
        match next.and_then(|d| Some((d.waiting_for?, d.words, d.call()?.kind))) {
            Some((next_peer, words, kind)) if next_peer < sights.len() => {
                suspect = next_peer;
                awaited = (words[3], words[2], kind);
            }
            _ => {
                let why = match (here, sight.doing.first().and_then(|d| d.call())) {
                    (Some(_), _) => format!("rank {suspect} is in the call but does not advance"),
                    (None, Some(other)) => format!(
                        "rank {suspect} has not come to {} #{}; it is in {other}",
                        awaited.2.name(),
                        awaited.1
                    ),
                    (None, None) => format!(
                        "rank {suspect} has not come to {} #{}; it is in no call",
                        awaited.2.name(),
                        awaited.1
                    ),
                };
                return verdict(suspect, Cause::Late, waiter, call, group_name, seconds, &why);
            }
        }
    }
    // Everybody waits for somebody: the ranks have called in an order that can never meet.
    let ring: Vec<String> = path
        .iter()
        .map(|&r| match sights[r].doing.first().and_then(|d| d.call()) {
            Some(c) => format!("rank {r} in {c}"),
            None => format!("rank {r}"),
        })
        .collect();
    let why = format!("the ranks wait for each other in a circle: {}", ring.join(", "));
    verdict(peer, Cause::Late, waiter, call, group_name, seconds, &why)
}

fn verdict(
    guilty: usize,
    cause: Cause,
    waiter: usize,
    call: &Call,
    group_name: &str,
    seconds: f64,
    why: &str,
) -> Failure {
    let text = format!(
        "no progress for {seconds:.1} s in {call} of group {group_name} (seen by rank {waiter}): {why}"
    );
    Failure { guilty, cause, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Algo;
    use crate::health::board::Doing;
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

    fn running(doing: &[(Call, Option<usize>)]) -> Sight {
        let doing =
            doing.iter().map(|(c, w)| Doing { words: c.words(), waiting_for: *w }).collect();
        Sight { state: State::Running, silent_ms: 0, doing }
    }

    #[test]
    fn the_chain_is_followed_to_the_rank_that_waits_for_nobody() {
        let c = call(1, 5);
        let sights = [
            running(&[(c, Some(1))]),
            running(&[(c, Some(2))]),
            running(&[(c, Some(3))]),
            running(&[]),
        ];
        let failure = blame(&sights, 0, 1, &c, "world", 30.0);
        assert_eq!((failure.guilty, failure.cause), (3, Cause::Late));
        assert!(failure.text.contains("rank 3 has not come to barrier #5; it is in no call"));
    }

    #[test]
    fn a_peer_held_up_in_another_group_is_innocent() {
        let (ours, theirs) = (call(1, 5), call(2, 9));
        let sights =
            [running(&[(ours, Some(1))]), running(&[(theirs, Some(2))]), running(&[(ours, None)])];
        let failure = blame(&sights, 0, 1, &ours, "world", 30.0);
        assert_eq!(failure.guilty, 2);
    }

    #[test]
    fn a_stopped_rank_is_named_even_if_it_seems_to_wait() {
        let c = call(1, 5);
        let mut sights = [running(&[(c, Some(1))]), running(&[(c, Some(0))])];
        sights[1].silent_ms = 9_000;
        let failure = blame(&sights, 0, 1, &c, "world", 30.0);
        assert_eq!((failure.guilty, failure.cause), (1, Cause::Silent));
    }

    #[test]
    fn a_circle_is_told_with_all_its_calls() {
        let (a, b) = (call(1, 5), call(2, 7));
        let sights = [running(&[(a, Some(1))]), running(&[(b, Some(0))])];
        let failure = blame(&sights, 0, 1, &a, "world", 30.0);
        assert!(failure.text.contains("circle"), "{}", failure.text);
        assert!(failure.text.contains("barrier #5") && failure.text.contains("barrier #7"));
    }
}
