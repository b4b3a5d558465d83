//! What a group has called before, in words that members compare with every call: so a disagreement
//! that no message showed when it happened (two roots that both only sent) comes out at the next call.

use crate::call::Call;

/// Equal on all members that have made the same calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Past {
    /// A hash of all calls so far.
    digest: u64,
    /// What tells the last call from others of its number: the first two of its words.
    last: [u64; 2],
}

/// What members of a group compare: the call's words but for the group, which the link or the memory
/// between them belongs to, and the past.
pub(crate) type Stamp = [u64; 6];

impl Past {
    /// The past once this call is over.
    pub(crate) fn then(self, call: &Call) -> Past {
        let [head, count, ..] = call.words();
        // Odd multipliers and a rotation: order and value of every word matter.
        let digest = (self.digest.rotate_left(29) ^ head).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let digest = (digest.rotate_left(29) ^ count).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Past { digest, last: [head, count] }
    }

    pub(crate) fn stamp(&self, call: &Call) -> Stamp {
        let [head, count, sequence, _] = call.words();
        [head, count, sequence, self.digest, self.last[0], self.last[1]]
    }

    /// In what another member's stamp differs from ours, as the end of "rank 3 calls …".
    pub(crate) fn difference(&self, call: &Call, theirs: &Stamp) -> String {
        let ours = self.stamp(call);
        if ours[..3] != theirs[..3] {
            return Call::describe([theirs[0], theirs[1], theirs[2], call.group]);
        }
        if ours[4..] == theirs[4..] {
            return "it, too, but has made other calls before".into();
        }
        let before = |stamp: &Stamp| {
            Call::describe([stamp[4], stamp[5], stamp[2].saturating_sub(1), call.group])
        };
        format!("it, too, but after {} instead of {}", before(theirs), before(&ours))
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
    fn a_past_that_differs_shows_now_and_later() {
        let (ours, theirs) = (broadcast(0, 1), broadcast(3, 1));
        let (mut a, mut b) = (Past::default().then(&ours), Past::default().then(&theirs));
        let next = broadcast(0, 2);
        let text = a.difference(&next, &b.stamp(&next));
        assert!(text.contains("after broadcast #1 (root 3, tree) instead of"), "{text}");
        (a, b) = (a.then(&next), b.then(&next));
        assert_ne!(a.stamp(&broadcast(0, 3)), b.stamp(&broadcast(0, 3)));
    }
}
