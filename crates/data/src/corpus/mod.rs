//! One or several token files as one set of documents, and the samples drawn from them.
//!
//! In every epoch the documents are shuffled and concatenated, each followed by the end token. Sample k consists of
//! `seq + 1` tokens starting at token `k × seq`: the last token of a sample is the first of the next, so every token is
//! an input once and a target once. The order of the samples is shuffled within the epoch too; otherwise a batch would
//! be one piece of a long document. Everything follows from the seed and the sample number; stored orders are a cache.
//!
//! A corrupt sample is skipped and the next valid sample takes its place. The rule depends only on the file, so all
//! ranks read the same tokens.

mod order;
mod split;

use crate::error::{Error, Result};
use crate::permutation::Permutation;
use crate::random::hash;
use crate::tokens::{Damage, TokenFile};
use order::Order;
pub use split::Split;
use split::Threshold;
use std::convert::Infallible;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Number of cached epoch orders: two for training (a sample may extend into the next epoch) and two for evaluation.
const CACHED_ORDERS: usize = 4;

/// Maximum number of consecutive corrupt samples that are skipped.
pub const MAX_SKIPPED: usize = 1000;

/// A range of tokens of a document.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    pub path: PathBuf,
    pub document: u64,
    /// The index after the document's last token stands for the end token.
    pub tokens: Range<u64>,
}

#[derive(Debug)]
pub struct Corpus {
    files: Vec<TokenFile>,
    /// Index of the first document of each file.
    firsts: Vec<u64>,
    documents: u64,
    threshold: Threshold,
    /// Tokens per epoch including end tokens: training and held out.
    epochs: [u64; 2],
    orders: Mutex<Vec<(OrderKey, Arc<Order>)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OrderKey {
    split: Split,
    seed: u64,
    epoch: u64,
}

impl Corpus {
    /// Opens a token file, or all `.tokens` files of a folder sorted by name.
    pub fn open(path: &Path, held_out: f64) -> Result<Corpus> {
        let files: Vec<_> =
            paths(path)?.iter().map(|path| TokenFile::open(path)).collect::<Result<_>>()?;
        same_tokenizer(&files)?;
        let mut documents = 0;
        let mut firsts = Vec::new();
        for file in &files {
            firsts.push(documents);
            documents += file.documents();
        }
        let hashes = files.iter().flat_map(|f| (0..f.documents()).map(|d| f.hash_of(d)));
        let threshold = Threshold::new(held_out, hashes).map_err(|what| Error::file(path, what))?;
        let mut corpus = Corpus {
            files,
            firsts,
            documents,
            threshold,
            epochs: [0; 2],
            orders: Mutex::default(),
        };
        for document in 0..documents {
            for split in [Split::Train, Split::HeldOut] {
                corpus.epochs[split as usize] += corpus.epoch_len(document, split);
            }
        }
        Ok(corpus)
    }

    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Tokens per epoch, including end tokens.
    pub fn epoch_tokens(&self, split: Split) -> u64 {
        self.epochs[split as usize]
    }

    /// Digest of the files, in order, and the held-out threshold. The digest of one file is that of `TokenFile::digest`.
    pub fn identity(&self) -> String {
        let digest = match &self.files[..] {
            [file] => file.digest(),
            files => {
                let all: String = files.iter().map(TokenFile::digest).collect();
                blake3::hash(all.as_bytes()).to_hex().to_string()
            }
        };
        format!("tokens {}, held-out threshold {}", &digest[..16], self.threshold)
    }

    /// Reads sample `number` of the endless sequence of epochs: `seq + 1` tokens, the length of `out`. Corrupt samples
    /// are skipped. Returns the number of the sample that was read and the damage found. After `MAX_SKIPPED` corrupt
    /// samples, `out` is filled with end tokens.
    pub fn sample(
        &self,
        split: Split,
        seed: u64,
        number: u64,
        out: &mut [u32],
    ) -> (u64, Vec<Damage>) {
        let mut skipped = Vec::new();
        loop {
            let tried = number + skipped.len() as u64;
            let Err(damage) = self.read(split, seed, tried, out) else { return (tried, skipped) };
            skipped.push(damage);
            if skipped.len() == MAX_SKIPPED {
                out.fill(self.files[0].end());
                return (tried, skipped);
            }
        }
    }

    /// The document ranges of a sample.
    pub fn pieces(&self, split: Split, seed: u64, number: u64, seq: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let Ok(()) = self.walk::<Infallible>(split, seed, number, seq, |document, tokens| {
            let (file, document) = self.file_of(document);
            pieces.push(Piece { path: file.path().to_path_buf(), document, tokens });
            Ok(())
        });
        pieces
    }

    fn read(&self, split: Split, seed: u64, number: u64, out: &mut [u32]) -> Result<(), Damage> {
        let (seq, mut rest) = (out.len().saturating_sub(1), out);
        self.walk(split, seed, number, seq, |document, tokens| {
            let count = (tokens.end - tokens.start) as usize;
            let (now, later) = std::mem::take(&mut rest).split_at_mut(count);
            rest = later;
            self.read_document(document, tokens.start, now)
        })
    }

    /// Calls `each` with every document of a sample and the range of its tokens, whose last may be the end token.
    fn walk<E>(
        &self,
        split: Split,
        seed: u64,
        number: u64,
        seq: usize,
        mut each: impl FnMut(u64, Range<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut of, at) = self.place(split, seed, number, seq);
        let mut order = self.order(of);
        let (mut place, mut from) = order.find(self, at);
        let mut left = seq as u64 + 1;
        loop {
            let document = order.document(place);
            let count = self.epoch_len(document, of.split).saturating_sub(from).min(left);
            if count > 0 {
                each(document, from..from + count)?;
            }
            left -= count;
            if left == 0 {
                return Ok(());
            }
            (place, from) = (place + 1, 0);
            // Continue in the next epoch.
            if place == self.documents {
                of.epoch += 1;
                (order, place) = (self.order(of), 0);
            }
        }
    }

    /// The epoch in which a sample starts, and its first token there.
    fn place(&self, split: Split, seed: u64, number: u64, seq: usize) -> (OrderKey, u64) {
        let epoch_tokens = u128::from(self.epoch_tokens(split));
        assert!(epoch_tokens > 0, "nothing is held out; open the source with held_out > 0");
        assert!(seq > 0, "a sample needs at least one input and one target");
        let seq = seq as u128;

        // Samples that start in the same epoch are shuffled among themselves.
        let epoch = u128::from(number) * seq / epoch_tokens;
        let first = |epoch: u128| (epoch * epoch_tokens).div_ceil(seq);
        let key = hash(&[SAMPLES, split as u64, seed, epoch as u64]);
        let shuffle = Permutation::new(key, (first(epoch + 1) - first(epoch)) as u64);
        let place = first(epoch) + u128::from(shuffle.place(number - first(epoch) as u64));
        let of = OrderKey { split, seed, epoch: epoch as u64 };
        (of, (place * seq - epoch * epoch_tokens) as u64)
    }

    /// Reads tokens of a document, followed by the end token.
    fn read_document(&self, document: u64, from: u64, out: &mut [u32]) -> Result<(), Damage> {
        let (file, document) = self.file_of(document);
        let own = (file.len_of(document) - from).min(out.len() as u64) as usize;
        out[own..].fill(file.end());
        if own == 0 { Ok(()) } else { file.read(document, from, &mut out[..own]) }
    }

    /// Tokens of a document in an epoch of the split, including the end token; zero if it is in the other split.
    fn epoch_len(&self, document: u64, split: Split) -> u64 {
        let (file, document) = self.file_of(document);
        match self.threshold.split_of(file.hash_of(document)) == split {
            true => file.len_of(document) + 1,
            false => 0,
        }
    }

    fn file_of(&self, document: u64) -> (&TokenFile, u64) {
        let file = self.firsts.partition_point(|first| *first <= document) - 1;
        (&self.files[file], document - self.firsts[file])
    }

    /// The document order of an epoch, computed on first use.
    fn order(&self, of: OrderKey) -> Arc<Order> {
        // The lock is held while an order is computed, so that it is computed once.
        let mut orders = self.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(at) = orders.iter().position(|(known, _)| *known == of) {
            let found = orders.remove(at);
            orders.push(found);
        } else {
            if orders.len() == CACHED_ORDERS {
                orders.remove(0);
            }
            let key = hash(&[DOCUMENTS, of.split as u64, of.seed, of.epoch]);
            orders.push((of, Arc::new(Order::new(self, of.split, key))));
        }
        let (_, newest) = orders.last().expect("just pushed");
        newest.clone()
    }
}

/// Separate the two shuffles of an epoch.
const DOCUMENTS: u64 = 1;
const SAMPLES: u64 = 2;

fn paths(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let entries = std::fs::read_dir(path).map_err(Error::system("reading", path))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::system("reading", path))?.path();
        if entry.extension().is_some_and(|extension| extension == "tokens") {
            found.push(entry);
        }
    }
    found.sort();
    match found.is_empty() {
        true => Err(Error::file(path, "no .tokens file in this folder")),
        false => Ok(found),
    }
}

/// All files must have been made with the same tokenizer.
fn same_tokenizer(files: &[TokenFile]) -> Result<()> {
    let of = |file: &TokenFile| (file.tokenizer_name(), file.vocab(), file.end());
    match files.iter().find(|file| of(file) != of(&files[0])) {
        None => Ok(()),
        Some(other) => Err(Error::file(
            other.path(),
            format!(
                "made with tokenizer {}, but {} with {}; prepare all files with one tokenizer",
                other.tokenizer_name(),
                files[0].path().display(),
                files[0].tokenizer_name()
            ),
        )),
    }
}
