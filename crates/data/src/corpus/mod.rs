//! One or several token files as one set of documents, and the samples that are cut from them.
//!
//! Documents are shuffled anew in every epoch and laid end to end, each followed by the end token; epoch
//! follows epoch. Sample k is `seq + 1` tokens of that row from token `k × seq` on: the last token of a
//! sample is the first of its neighbour, so that every token is an input once and a target once. Which
//! sample comes when is shuffled within the epoch too; otherwise a batch would be one piece of a long
//! document. All of it follows from the seed and the number of the sample. What is kept is a cache.
//!
//! A sample of which a token is damaged is left out, and the next number's is taken twice: a rule that needs
//! nothing but the file, so that all who ask for the sample get the same.

mod order;
mod split;

use crate::chance::hash;
use crate::error::{Error, Result};
use crate::permutation::Permutation;
use crate::tokens::{Damage, TokenFile};
use order::Order;
pub use split::Split;
use split::Threshold;
use std::convert::Infallible;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// How many epochs' orders are kept: two for training (a sample may reach into the next epoch) and two
/// for evaluation.
const KEPT: usize = 4;

/// How many damaged samples in a row are passed over in search of a good one.
pub const PATIENCE: usize = 1000;

/// A run of a document's tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    pub path: PathBuf,
    pub document: u64,
    /// One past its last token stands for the end token.
    pub tokens: Range<u64>,
}

#[derive(Debug)]
pub struct Corpus {
    files: Vec<TokenFile>,
    /// The number of the first document of each file.
    firsts: Vec<u64>,
    documents: u64,
    threshold: Threshold,
    /// Tokens of an epoch, with those between documents: of training, and held out.
    epochs: [u64; 2],
    orders: Mutex<Vec<(OrderOf, Arc<Order>)>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OrderOf {
    split: Split,
    seed: u64,
    epoch: u64,
}

impl Corpus {
    /// A token file, or a folder of them: all that end in .tokens, by name.
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
        let marks = files.iter().flat_map(|f| (0..f.documents()).map(|d| f.mark_of(d)));
        let threshold = Threshold::new(held_out, marks).map_err(|what| Error::file(path, what))?;
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
                corpus.epochs[split as usize] += corpus.room(document, split);
            }
        }
        Ok(corpus)
    }

    pub fn files(&self) -> &[TokenFile] {
        &self.files
    }

    /// Tokens of an epoch, with those between documents.
    pub fn epoch_tokens(&self, split: Split) -> u64 {
        self.epochs[split as usize]
    }

    /// Files by their digests, in order, and what is held out of them.
    pub fn identity(&self) -> String {
        let mut digest = blake3::Hasher::new();
        self.files.iter().for_each(|file| {
            digest.update(file.digest().as_bytes());
        });
        digest.update(&self.threshold.to_le_bytes());
        format!("tokens {}", &digest.finalize().to_hex()[..16])
    }

    /// Sample `number` of the endless row of epochs: `seq + 1` tokens, as many as `out` holds. Where one is
    /// damaged its successors are tried: which sample it became, and what was passed over on the way. After
    /// `PATIENCE` of them it gives up, and leaves nothing but end tokens.
    pub fn sample(
        &self,
        split: Split,
        seed: u64,
        number: u64,
        out: &mut [u32],
    ) -> (u64, Vec<Damage>) {
        let mut passed = Vec::new();
        loop {
            let tried = number + passed.len() as u64;
            let Err(damage) = self.read(split, seed, tried, out) else { return (tried, passed) };
            passed.push(damage);
            if passed.len() == PATIENCE {
                out.fill(self.files[0].end());
                return (tried, passed);
            }
        }
    }

    /// Where the tokens of a sample lie.
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

    /// Goes through the documents that a sample is made of: each with the run of its tokens, the last of which
    /// may be the end token.
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
            let count = self.room(document, of.split).saturating_sub(from).min(left);
            if count > 0 {
                each(document, from..from + count)?;
            }
            left -= count;
            if left == 0 {
                return Ok(());
            }
            (place, from) = (place + 1, 0);
            // Over the end of an epoch, and into the next one.
            if place == self.documents {
                of.epoch += 1;
                (order, place) = (self.order(of), 0);
            }
        }
    }

    /// The epoch that a sample starts in, and at which of its tokens.
    fn place(&self, split: Split, seed: u64, number: u64, seq: usize) -> (OrderOf, u64) {
        let epoch_tokens = u128::from(self.epoch_tokens(split));
        assert!(
            epoch_tokens > 0,
            "nothing is held out; open the source with a fraction to hold out"
        );
        assert!(seq > 0, "a sample is one token and its successors, not one token alone");
        let seq = seq as u128;

        // The samples that start in the same epoch change places with each other.
        let epoch = u128::from(number) * seq / epoch_tokens;
        let first = |epoch: u128| (epoch * epoch_tokens).div_ceil(seq);
        let key = hash(&[SAMPLES, split as u64, seed, epoch as u64]);
        let shuffle = Permutation::new(key, (first(epoch + 1) - first(epoch)) as u64);
        let place = first(epoch) + u128::from(shuffle.place(number - first(epoch) as u64));
        let of = OrderOf { split, seed, epoch: epoch as u64 };
        (of, (place * seq - epoch * epoch_tokens) as u64)
    }

    /// Tokens of a document, the last of which is the end token.
    fn read_document(&self, document: u64, from: u64, out: &mut [u32]) -> Result<(), Damage> {
        let (file, document) = self.file_of(document);
        let own = (file.len_of(document) - from).min(out.len() as u64) as usize;
        out[own..].fill(file.end());
        if own == 0 { Ok(()) } else { file.read(document, from, &mut out[..own]) }
    }

    /// How many tokens a document takes in an epoch of the split: its own and the end, or none.
    fn room(&self, document: u64, split: Split) -> u64 {
        let (file, document) = self.file_of(document);
        match self.threshold.split_of(file.mark_of(document)) == split {
            true => file.len_of(document) + 1,
            false => 0,
        }
    }

    fn file_of(&self, document: u64) -> (&TokenFile, u64) {
        let file = self.firsts.partition_point(|first| *first <= document) - 1;
        (&self.files[file], document - self.firsts[file])
    }

    /// The order of an epoch, made when it is first asked for.
    fn order(&self, of: OrderOf) -> Arc<Order> {
        // Who comes second waits for the first rather than doing the same work.
        let mut orders = self.orders.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(at) = orders.iter().position(|(known, _)| *known == of) {
            let found = orders.remove(at);
            orders.push(found);
        } else {
            if orders.len() == KEPT {
                orders.remove(0);
            }
            let key = hash(&[DOCUMENTS, of.split as u64, of.seed, of.epoch]);
            orders.push((of, Arc::new(Order::new(self, of.split, key))));
        }
        let (_, newest) = orders.last().expect("one was just put there");
        newest.clone()
    }
}

/// Keeps the two shuffles of an epoch apart.
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
        true => Err(Error::file(path, "no file in this folder ends in .tokens")),
        false => Ok(found),
    }
}

/// Tokens of different tokenizers would be trained on as if they were the same.
fn same_tokenizer(files: &[TokenFile]) -> Result<()> {
    let of = |file: &TokenFile| (file.tokenizer_name(), file.vocab(), file.end());
    match files.iter().find(|file| of(file) != of(&files[0])) {
        None => Ok(()),
        Some(other) => Err(Error::file(
            other.path(),
            format!(
                "made with {}, but {} with {}; prepare them with one tokenizer",
                other.tokenizer_name(),
                files[0].path().display(),
                files[0].tokenizer_name()
            ),
        )),
    }
}
