//! The order of the documents in one epoch, and where each begins.
//!
//! The order itself is a permutation that is computed, not stored. Where documents begin is a running
//! sum, of which one in `STRIDE` is kept: 10 million documents take 1.2 MB, and finding a token takes a
//! binary search and at most `STRIDE` steps.

use super::{Corpus, Split};
use crate::permutation::Permutation;

const STRIDE: u64 = 64;

#[derive(Debug)]
pub struct Order {
    shuffle: Permutation,
    split: Split,
    /// Where the document at place 0, `STRIDE`, 2 `STRIDE` … begins, in tokens.
    milestones: Vec<u64>,
}

impl Order {
    /// Documents that are not of the split keep their place and take no room.
    pub fn new(corpus: &Corpus, split: Split, key: u64) -> Order {
        let shuffle = Permutation::new(key, corpus.documents);
        let mut milestones = Vec::new();
        let mut start = 0;
        for place in 0..corpus.documents {
            if place % STRIDE == 0 {
                milestones.push(start);
            }
            start += corpus.room(shuffle.place(place), split);
        }
        assert_eq!(start, corpus.epoch_tokens(split), "every document once");
        Order { shuffle, split, milestones }
    }

    /// The document at a place.
    pub fn document(&self, place: u64) -> u64 {
        self.shuffle.place(place)
    }

    /// The place whose document holds token `at` of the epoch, and which of its tokens that is.
    pub fn find(&self, corpus: &Corpus, at: u64) -> (u64, u64) {
        assert!(at < corpus.epoch_tokens(self.split), "token {at} is not in the epoch");
        let milestone = self.milestones.partition_point(|start| *start <= at) - 1;
        let (mut place, mut start) = (milestone as u64 * STRIDE, self.milestones[milestone]);
        loop {
            let room = corpus.room(self.document(place), self.split);
            if at < start + room {
                return (place, at - start);
            }
            (place, start) = (place + 1, start + room);
        }
    }
}
