//! What a run is trained on: the built-in grammar or token files, behind one face. A sample is a pure
//! function of (seed, step, index in the global batch): ranks may ask for any of them in any order, and
//! a run resumes from the number of its step alone.

use crate::chance::hash;
use crate::corpus::{Corpus, PATIENCE, Piece, Split};
use crate::error::Result;
use crate::grammar::Grammar;
use crate::tokenizer::{Tokenizer, bytes_to_text};
use crate::tokens::Damage;
use std::path::Path;
use std::sync::OnceLock;

/// The name under which the built-in language is opened.
pub const GRAMMAR: &str = "builtin:grammar";

/// Where samples come from.
///
/// ```
/// use lockstep_data::{Options, Source, Split};
///
/// let source = Source::open("builtin:grammar", &Options::default()).unwrap();
/// let mut tokens = [0; 33];
/// source.sample(Split::Train, 1, 10, 8, 3, &mut tokens);
/// let mut again = [0; 33];
/// source.sample(Split::Train, 1, 10, 8, 3, &mut again);
/// assert_eq!(tokens, again);
/// println!("{}", source.decode(&tokens).unwrap());
/// ```
#[derive(Debug)]
pub struct Source {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Grammar(Grammar),
    Corpus {
        corpus: Corpus,
        /// Read when it is first needed: training does without.
        tokenizer: OnceLock<Tokenizer>,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The fraction of documents that is never trained on. The grammar does not need it: its held-out
    /// samples are drawn apart.
    pub held_out: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options { held_out: 0.01 }
    }
}

impl Source {
    /// How many damaged samples in a row are passed over in search of a good one.
    pub const PATIENCE: usize = PATIENCE;

    /// `builtin:grammar`, a token file, or a folder of token files.
    pub fn open(spec: &str, options: &Options) -> Result<Source> {
        let kind = match spec {
            GRAMMAR => Kind::Grammar(Grammar::new()),
            path => Kind::Corpus {
                corpus: Corpus::open(Path::new(path), options.held_out)?,
                tokenizer: OnceLock::new(),
            },
        };
        Ok(Source { kind })
    }

    /// Every token is below.
    pub fn vocab(&self) -> usize {
        match &self.kind {
            Kind::Grammar(_) => Grammar::VOCAB,
            Kind::Corpus { corpus, .. } => corpus.files()[0].vocab() as usize,
        }
    }

    /// The token that ends a document, where there are documents.
    pub fn end(&self) -> Option<u32> {
        match &self.kind {
            Kind::Grammar(_) => None,
            Kind::Corpus { corpus, .. } => Some(corpus.files()[0].end()),
        }
    }

    /// The lowest mean loss that any model can reach on samples of `seq + 1` tokens, in nats per token,
    /// where it is known exactly.
    pub fn entropy(&self, seq: usize) -> Option<f64> {
        match &self.kind {
            Kind::Grammar(grammar) => Some(grammar.entropy(seq)),
            Kind::Corpus { .. } => None,
        }
    }

    /// How many tokens a pass over everything takes; `None` where there is no end. Zero if nothing is
    /// held out.
    pub fn epoch_tokens(&self, split: Split) -> Option<u64> {
        match &self.kind {
            Kind::Grammar(_) => None,
            Kind::Corpus { corpus, .. } => Some(corpus.epoch_tokens(split)),
        }
    }

    /// Sample `index` of the global batch of `step`: inputs and their successors, `seq + 1` tokens, as
    /// many as `out` holds. Panics if the split is empty (see `epoch_tokens`).
    ///
    /// Gives what was found damaged: nothing, but for files that changed after they were written. The first good
    /// one of the following samples is then taken instead; after [`Source::PATIENCE`] damaged ones `out` holds
    /// nothing but end tokens.
    pub fn sample(
        &self,
        split: Split,
        seed: u64,
        step: u64,
        global_batch: usize,
        index: usize,
        out: &mut [u32],
    ) -> Vec<Damage> {
        let number = number(step, global_batch, index);
        match &self.kind {
            Kind::Grammar(grammar) => {
                grammar.sample(hash(&[split as u64, seed, number]), out);
                vec![]
            }
            Kind::Corpus { corpus, .. } => corpus.sample(split, seed, number, out).1,
        }
    }

    /// Where the tokens of that sample lie, in their order; nowhere if the program makes them.
    pub fn pieces(
        &self,
        split: Split,
        seed: u64,
        step: u64,
        global_batch: usize,
        index: usize,
        seq: usize,
    ) -> Vec<Piece> {
        let Kind::Corpus { corpus, .. } = &self.kind else { return vec![] };
        let number = number(step, global_batch, index);
        let (taken, _) = corpus.sample(split, seed, number, &mut vec![0; seq + 1]);
        corpus.pieces(split, seed, taken, seq)
    }

    /// Tokens of a text, for a prompt.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Grammar(_) => Ok(text.bytes().map(u32::from).collect()),
            Kind::Corpus { corpus, tokenizer } => tokenizer_of(corpus, tokenizer)?.encode(text),
        }
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Grammar(_) => Ok(bytes_to_text(tokens)),
            Kind::Corpus { corpus, tokenizer } => tokenizer_of(corpus, tokenizer)?.decode(tokens),
        }
    }

    /// The same for two sources whose samples are the same: a run that resumes can see whether it is
    /// on the data it began with.
    pub fn identity(&self) -> String {
        match &self.kind {
            Kind::Grammar(grammar) => grammar.identity(),
            Kind::Corpus { corpus, .. } => corpus.identity(),
        }
    }

    /// The built-in language, if this is it.
    pub fn grammar(&self) -> Option<&Grammar> {
        match &self.kind {
            Kind::Grammar(grammar) => Some(grammar),
            Kind::Corpus { .. } => None,
        }
    }
}

fn number(step: u64, global_batch: usize, index: usize) -> u64 {
    assert!(index < global_batch, "sample {index} of a global batch of {global_batch}");
    step * global_batch as u64 + index as u64
}

fn tokenizer_of<'a>(corpus: &Corpus, known: &'a OnceLock<Tokenizer>) -> Result<&'a Tokenizer> {
    if known.get().is_none() {
        // Two threads may both read it; one of the equal tokenizers stays.
        let _ = known.set(corpus.files()[0].tokenizer()?);
    }
    Ok(known.get().expect("it was just set"))
}
