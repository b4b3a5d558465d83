//! The source of training samples: the built-in grammar or token files. A sample is a pure function of (seed, global
//! batch, index in it), so ranks read samples in any order and a run resumes from its step number alone.

use crate::corpus::{Corpus, MAX_SKIPPED, Piece, Split};
use crate::error::Result;
use crate::grammar::Grammar;
use crate::random::hash;
use crate::tokenizer::{StoredTokenizer, Tokenizer};
use crate::tokens::Damage;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Name of the built-in language.
pub const GRAMMAR: &str = "builtin:grammar";

/// A source of samples.
///
/// ```
/// use lockstep_data::{Options, SampleId, Source, Split};
///
/// let source = Source::open("builtin:grammar", &Options::default()).unwrap();
/// let id = SampleId { split: Split::Train, seed: 1, batch: 10, global_batch: 8, index: 3 };
/// let mut tokens = [0; 33];
/// source.sample(id, &mut tokens);
/// let mut same = [0; 33];
/// source.sample(id, &mut same);
/// assert_eq!(tokens, same);
/// println!("{}", source.decode(&tokens).unwrap());
/// ```
#[derive(Debug)]
pub struct Source {
    inner: Inner,
    number: u64,
    /// Loaded on first use; training does not need it.
    tokenizer: OnceLock<Tokenizer>,
}

#[derive(Debug)]
enum Inner {
    Grammar(Grammar),
    Corpus(Corpus),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Fraction of documents held out for evaluation. Unused by the grammar, which draws held-out samples separately.
    pub held_out: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { held_out: 0.01 }
    }
}

impl Source {
    /// Maximum number of consecutive corrupt samples that are skipped.
    pub const MAX_SKIPPED: usize = MAX_SKIPPED;

    /// Opens `builtin:grammar`, a token file, or a folder of token files.
    pub fn open(spec: &str, options: &Options) -> Result<Source> {
        let inner = match spec {
            GRAMMAR => Inner::Grammar(Grammar::new()),
            path => Inner::Corpus(Corpus::open(Path::new(path), options.held_out)?),
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Source { inner, number, tokenizer: OnceLock::new() })
    }

    /// A number that no other source of this process has.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Vocabulary size; every token is smaller.
    pub fn vocab(&self) -> usize {
        match &self.inner {
            Inner::Grammar(_) => Grammar::VOCAB,
            Inner::Corpus(corpus) => corpus.files()[0].vocab() as usize,
        }
    }

    /// The end-of-document token, if the source has documents.
    pub fn end(&self) -> Option<u32> {
        match &self.inner {
            Inner::Grammar(_) => None,
            Inner::Corpus(corpus) => Some(corpus.files()[0].end()),
        }
    }

    /// The lowest mean loss that any model can reach on samples of `seq + 1` tokens, in nats per token. Known for the
    /// grammar only.
    pub fn entropy(&self, seq: usize) -> Option<f64> {
        match &self.inner {
            Inner::Grammar(grammar) => Some(grammar.entropy(seq)),
            Inner::Corpus(_) => None,
        }
    }

    /// Tokens in one epoch; `None` for an endless source, zero if nothing is held out.
    pub fn epoch_tokens(&self, split: Split) -> Option<u64> {
        match &self.inner {
            Inner::Grammar(_) => None,
            Inner::Corpus(corpus) => Some(corpus.epoch_tokens(split)),
        }
    }

    /// Reads a sample of `seq + 1` tokens (inputs and targets) into `out`. Panics if the split is empty (see
    /// `epoch_tokens`).
    ///
    /// Returns the corrupt samples that were skipped. The next valid sample takes their place; after
    /// [`Source::MAX_SKIPPED`] corrupt samples, `out` is filled with end tokens.
    pub fn sample(&self, id: SampleId, out: &mut [u32]) -> Vec<Damage> {
        let SampleId { split, seed, .. } = id;
        let number = id.number();
        match &self.inner {
            Inner::Grammar(grammar) => {
                grammar.sample(hash(&[split as u64, seed, number]), out);
                vec![]
            }
            Inner::Corpus(corpus) => corpus.sample(split, seed, number, out).1,
        }
    }

    /// The document ranges that a sample of `seq + 1` tokens consists of, in order; empty for the grammar.
    pub fn pieces(&self, id: SampleId, seq: usize) -> Vec<Piece> {
        let Inner::Corpus(corpus) = &self.inner else { return vec![] };
        let (taken, _) = corpus.sample(id.split, id.seed, id.number(), &mut vec![0; seq + 1]);
        corpus.pieces(id.split, id.seed, taken, seq)
    }

    /// The tokenizer, which may be a part of the data.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        if self.tokenizer.get().is_none() {
            let tokenizer = match &self.inner {
                Inner::Grammar(_) => Tokenizer::endless_bytes(),
                Inner::Corpus(corpus) => corpus.files()[0].tokenizer()?,
            };
            // Two threads may both load it; one of the equal tokenizers is kept.
            let _ = self.tokenizer.set(tokenizer);
        }
        Ok(self.tokenizer.get().expect("it was just set"))
    }

    /// The tokenizer, without the data.
    pub fn into_tokenizer(self) -> Result<Tokenizer> {
        self.tokenizer()?;
        Ok(self.tokenizer.into_inner().expect("it was just loaded"))
    }

    /// The tokenizer as it is stored in a run's folder.
    pub fn stored_tokenizer(&self) -> StoredTokenizer {
        match &self.inner {
            Inner::Grammar(_) => StoredTokenizer::bytes(false),
            Inner::Corpus(corpus) => corpus.files()[0].stored_tokenizer(),
        }
    }

    /// Encodes a prompt.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.tokenizer()?.encode(text)
    }

    /// Decodes tokens to text.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer()?.decode(tokens)
    }

    /// Digest of the source: equal for sources with equal samples. A resumed run checks it.
    pub fn identity(&self) -> String {
        match &self.inner {
            Inner::Grammar(grammar) => grammar.identity(),
            Inner::Corpus(corpus) => corpus.identity(),
        }
    }

    /// The built-in grammar, if this is its source.
    pub fn grammar(&self) -> Option<&Grammar> {
        match &self.inner {
            Inner::Grammar(grammar) => Some(grammar),
            Inner::Corpus(_) => None,
        }
    }
}

/// Identifies a sample of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleId {
    pub split: Split,
    pub seed: u64,
    /// Number of the global batch, counted from 0: one less than the step that trains on it.
    pub batch: u64,
    /// Samples of a global batch.
    pub global_batch: usize,
    /// Index in the global batch.
    pub index: usize,
}

impl SampleId {
    /// Position in the endless sequence of samples.
    fn number(&self) -> u64 {
        let SampleId { batch, global_batch, index, .. } = *self;
        assert!(index < global_batch, "sample {index} of a global batch of {global_batch}");
        batch * global_batch as u64 + index as u64
    }
}
