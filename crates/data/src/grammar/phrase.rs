//! Phrases, the building blocks of a grammar: a text, a sequence of phrases, or a weighted choice. Phrases are not
//! recursive, so every phrase is finite.

/// A distribution over texts.
#[derive(Clone, Debug)]
pub enum Phrase {
    Text(&'static str),
    Row(Vec<Phrase>),
    /// Weights, which need not sum to one.
    Choice(Vec<(f64, Phrase)>),
}

use Phrase::*;

/// A literal text.
pub fn text(text: &'static str) -> Phrase {
    Text(text)
}

/// A sequence of phrases.
pub fn sequence<const N: usize>(parts: [Phrase; N]) -> Phrase {
    Row(parts.into())
}

/// A weighted choice.
pub fn choice<const N: usize>(options: [(f64, Phrase); N]) -> Phrase {
    Choice(options.into())
}

/// The phrase with this probability, otherwise nothing.
pub fn optional(probability: f64, phrase: Phrase) -> Phrase {
    choice([(probability, phrase), (1.0 - probability, Text(""))])
}

/// One of these words. The weights decrease from 2 to 1 along the list.
pub fn word(words: &[&'static str]) -> Phrase {
    word_with(words, Text)
}

/// One of these words, each transformed by `phrase_of`.
pub fn word_with(words: &[&'static str], phrase_of: impl Fn(&'static str) -> Phrase) -> Phrase {
    let weight = |i| 2.0 - i as f64 / words.len() as f64;
    Choice(words.iter().enumerate().map(|(i, word)| (weight(i), phrase_of(word))).collect())
}

impl Phrase {
    /// Entropy of the derivation in nats: the sum over choices of their probability times their entropy. Equals the
    /// entropy of the text if the language is unambiguous.
    pub fn nats(&self) -> f64 {
        match self {
            Text(_) => 0.0,
            Row(parts) => parts.iter().map(Phrase::nats).sum(),
            Choice(options) => {
                probabilities(options).map(|(p, phrase)| p * (phrase.nats() - p.ln())).sum()
            }
        }
    }

    /// Mean length of the text in bytes.
    pub fn bytes(&self) -> f64 {
        match self {
            Text(text) => text.len() as f64,
            Row(parts) => parts.iter().map(Phrase::bytes).sum(),
            Choice(options) => probabilities(options).map(|(p, phrase)| p * phrase.bytes()).sum(),
        }
    }
}

/// The options with non-zero weight, normalized to probabilities.
pub fn probabilities(options: &[(f64, Phrase)]) -> impl Iterator<Item = (f64, &Phrase)> {
    let sum: f64 = options.iter().map(|(weight, _)| weight).sum();
    let possible = options.iter().filter(|(weight, _)| *weight > 0.0);
    possible.map(move |(weight, phrase)| (weight / sum, phrase))
}
