//! Phrases: what a grammar is written in. A phrase is a text, several phrases in a row, or a choice
//! between phrases by weight; nothing refers back to itself, so every phrase ends.
//! Knows nothing of automata or samples.

/// A set of texts and how likely each is.
#[derive(Clone, Debug)]
pub enum Phrase {
    Text(&'static str),
    Row(Vec<Phrase>),
    /// Weights, which need not sum to one.
    Choice(Vec<(f64, Phrase)>),
}

use Phrase::*;

/// A text as it stands.
pub fn text(text: &'static str) -> Phrase {
    Text(text)
}

/// One after the other.
pub fn row<const N: usize>(parts: [Phrase; N]) -> Phrase {
    Row(parts.into())
}

/// One of several, by weight.
pub fn choice<const N: usize>(options: [(f64, Phrase); N]) -> Phrase {
    Choice(options.into())
}

/// The phrase with this probability, or else nothing.
pub fn perhaps(probability: f64, phrase: Phrase) -> Phrase {
    choice([(probability, phrase), (1.0 - probability, Text(""))])
}

/// One of these words, those at the front more often: the weights fall from 2 to 1 along the list.
pub fn word(words: &[&'static str]) -> Phrase {
    word_with(words, Text)
}

/// One of these words, each with what `dress` makes of it.
pub fn word_with(words: &[&'static str], dress: impl Fn(&'static str) -> Phrase) -> Phrase {
    let weight = |i| 2.0 - i as f64 / words.len() as f64;
    Choice(words.iter().enumerate().map(|(i, word)| (weight(i), dress(word))).collect())
}

impl Phrase {
    /// The nats that it takes to say which derivation was made: the sum over choices of how often
    /// each is met times what it decides. When every text has one derivation only, as in a language
    /// that is unambiguous, this is the entropy of the text.
    pub fn nats(&self) -> f64 {
        match self {
            Text(_) => 0.0,
            Row(parts) => parts.iter().map(Phrase::nats).sum(),
            Choice(options) => {
                shares(options).map(|(share, phrase)| share * (phrase.nats() - share.ln())).sum()
            }
        }
    }

    /// How many bytes the text has on average.
    pub fn bytes(&self) -> f64 {
        match self {
            Text(text) => text.len() as f64,
            Row(parts) => parts.iter().map(Phrase::bytes).sum(),
            Choice(options) => shares(options).map(|(share, phrase)| share * phrase.bytes()).sum(),
        }
    }
}

/// The options that can be taken, with weights that sum to one.
pub fn shares(options: &[(f64, Phrase)]) -> impl Iterator<Item = (f64, &Phrase)> {
    let sum: f64 = options.iter().map(|(weight, _)| weight).sum();
    let possible = options.iter().filter(|(weight, _)| *weight > 0.0);
    possible.map(move |(weight, phrase)| (weight / sum, phrase))
}
