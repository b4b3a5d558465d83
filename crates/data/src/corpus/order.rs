//! The document order of one epoch and the offsets of the documents.
//!
//! The order is a permutation that is computed, not stored. Every `STRIDE`th offset is stored: 10 million documents
//! take 1.2 MB, and finding a token takes a binary search and at most `STRIDE` steps.

use super::{Corpus, Split};
use crate::permutation::Permutation;

const STRIDE: u64 = 64;

#[derive(Debug)]
pub struct Order {
    shuffle: Permutation,
    split: Split,
    /// Token offsets of the documents at positions 0, `STRIDE`, 2 `STRIDE`, …
    milestones: Vec<u64>,
}

impl Order {
    /// Documents of the other split keep their position and have length zero.
    pub fn new(corpus: &Corpus, split: Split, key: u64) -> Order {
        let shuffle = Permutation::new(key, corpus.documents);
        let mut milestones = Vec::new();
        let mut start = 0;
        for place in 0..corpus.documents {
            if place % STRIDE == 0 {
                milestones.push(start);
            }
            start += corpus.epoch_len(shuffle.place(place), split);
        }
        assert_eq!(start, corpus.epoch_tokens(split), "every document once");
        Order { shuffle, split, milestones }
    }

    /// The document at a position.
    pub fn document(&self, place: u64) -> u64 {
        self.shuffle.place(place)
    }

    /// The position of the document that contains token `at` of the epoch, and the token's index in it.
    pub fn find(&self, corpus: &Corpus, at: u64) -> (u64, u64) {
        assert!(at < corpus.epoch_tokens(self.split), "token {at} is not in the epoch");
        let milestone = self.milestones.partition_point(|start| *start <= at) - 1;
        let (mut place, mut start) = (milestone as u64 * STRIDE, self.milestones[milestone]);
        loop {
            let len = corpus.epoch_len(self.document(place), self.split);
            if at < start + len {
                return (place, at - start);
            }
            (place, start) = (place + 1, start + len);
        }
    }
}
