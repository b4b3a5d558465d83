//! A digest of all earlier calls of a group. Members compare it with every call, so a disagreement that
//! no message revealed when it happened (two roots that both only sent) is found at the next call.

use crate::call::{Call, Stamp};

/// Equal on all members that have made the same calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallHistory {
    /// Hash of all calls so far.
    digest: u64,
    /// The first two words of the last call, which identify it among calls with its number.
    last: [u64; 2],
}

impl CallHistory {
    /// The history after `call`.
    pub(crate) fn then(self, call: &Call) -> CallHistory {
        let [head, count, ..] = call.words();
        // Odd multipliers and a rotation: order and value of every word matter.
        let digest = (self.digest.rotate_left(29) ^ head).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let digest = (digest.rotate_left(29) ^ count).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        CallHistory { digest, last: [head, count] }
    }

    pub(crate) fn stamp(&self, call: &Call) -> Stamp {
        let [head, count, sequence, _] = call.words();
        [head, count, sequence, self.digest, self.last[0], self.last[1]]
    }

    /// How another member's stamp differs from ours, as the end of "rank 3 calls …".
    pub(crate) fn difference(&self, call: &Call, theirs: &Stamp) -> String {
        let ours = self.stamp(call);
        if ours[..3] != theirs[..3] {
            return Call::describe([theirs[0], theirs[1], theirs[2], call.group]);
        }
        if ours[4..] == theirs[4..] {
            return "the same, but its earlier calls differ".into();
        }
        let before = |stamp: &Stamp| {
            Call::describe([stamp[4], stamp[5], stamp[2].saturating_sub(1), call.group])
        };
        format!("the same, but after {} instead of {}", before(theirs), before(&ours))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Algo;
    use lockstep_types::Collective;

    fn broadcast(root: usize, sequence: u64) -> Call {
        Call {
            kind: Collective::Broadcast,
            algo: Algo::Tree,
            dtype: None,
            op: None,
            root: Some(root),
            count: 7,
            sequence,
            group: 1,
        }
    }

    #[test]
    fn different_histories_differ_in_all_later_stamps() {
        let (ours, theirs) = (broadcast(0, 1), broadcast(3, 1));
        let (mut a, mut b) =
            (CallHistory::default().then(&ours), CallHistory::default().then(&theirs));
        let next = broadcast(0, 2);
        let text = a.difference(&next, &b.stamp(&next));
        assert!(text.contains("after broadcast #1 (root 3, tree) instead of"), "{text}");
        (a, b) = (a.then(&next), b.then(&next));
        assert_ne!(a.stamp(&broadcast(0, 3)), b.stamp(&broadcast(0, 3)));
    }
}
