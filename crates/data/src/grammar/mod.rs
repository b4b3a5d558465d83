//! `builtin:grammar`: endless text in a small language whose entropy is known exactly, so that a training run can be
//! compared with the best possible model (README.md). Reads no file and has no state: a sample is a function of its key.

mod automaton;
mod language;
mod phrase;

use std::sync::LazyLock;

use crate::random::Stream;
use automaton::{Arc, Automaton};

/// The language never changes, so all ranks of a process share it.
static AUTOMATON: LazyLock<Automaton> =
    LazyLock::new(|| Automaton::repeating(&language::sentence()));

/// The built-in language: samples and their exact entropy.
///
/// ```
/// use lockstep_data::Grammar;
///
/// let grammar = Grammar::new();
/// let mut sample = [0; 65];
/// grammar.sample(7, &mut sample);
/// // The loss of the best possible model on this sample, and on average.
/// let loss: f64 = grammar.information(&sample).iter().sum::<f64>() / 64.0;
/// let floor = grammar.entropy(64);
/// assert!((loss - floor).abs() < 0.3, "{loss} against {floor}");
/// ```
#[derive(Debug)]
pub struct Grammar {
    automaton: &'static Automaton,
}

impl Default for Grammar {
    fn default() -> Grammar {
        Grammar::new()
    }
}

impl Grammar {
    /// Tokens are bytes.
    pub const VOCAB: usize = 256;

    pub fn new() -> Grammar {
        Grammar { automaton: &AUTOMATON }
    }

    /// Fills `out` with sentences for `key`, starting at the beginning of one.
    pub fn sample(&self, key: u64, out: &mut [u32]) {
        let mut stream = Stream::new(key);
        let mut state = 0;
        for token in out {
            let arc = self.draw(state, stream.unit());
            (*token, state) = (arc.byte.into(), arc.to);
        }
    }

    /// Entropy of the targets in a sample of `seq + 1` tokens, in nats per token: the lowest mean loss that any model can
    /// reach on such samples. Exact up to rounding.
    pub fn entropy(&self, seq: usize) -> f64 {
        self.automaton.entropy(seq)
    }

    /// Limit of `entropy(seq)` for long samples: the entropy of a sentence divided by its mean length.
    pub fn rate(&self) -> f64 {
        let sentence = language::sentence();
        sentence.nats() / sentence.bytes()
    }

    /// Digest of the language.
    pub fn identity(&self) -> String {
        let language = format!("{:?}", language::sentence());
        format!("grammar {}", &blake3::hash(language.as_bytes()).to_hex()[..16])
    }

    /// Information of each token after the first, in nats: -ln p(token | previous tokens). Infinite from the first token
    /// that the language does not allow.
    pub fn information(&self, sample: &[u32]) -> Vec<f64> {
        let mut state = Some(0);
        let nats = sample.iter().map(|token| {
            let arcs = state.map_or(&[][..], |state| self.automaton.arcs(state));
            let arc = arcs.iter().find(|arc| u32::from(arc.byte) == *token);
            state = arc.map(|arc| arc.to);
            arc.map_or(f64::INFINITY, |arc| -arc.probability.ln())
        });
        nats.skip(1).collect()
    }

    /// Draws an arc with a uniform number.
    fn draw(&self, state: usize, mut unit: f64) -> Arc {
        let arcs = self.automaton.arcs(state);
        for arc in &arcs[..arcs.len() - 1] {
            if unit < arc.probability {
                return *arc;
            }
            unit -= arc.probability;
        }
        arcs[arcs.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the entropy rate from the derivations and from the automaton. They would differ if the language were
    /// ambiguous.
    #[test]
    fn entropy_rate_of_derivations_equals_that_of_the_automaton() {
        let grammar = Grammar::new();
        let rate = grammar.rate();
        // The mean over n bytes approaches the rate like 1/n; the difference of two means removes the influence of the
        // start.
        let (short, long) = (4096, 8192);
        let tail = (grammar.entropy(long) * long as f64 - grammar.entropy(short) * short as f64)
            / (long - short) as f64;
        assert!((tail - rate).abs() < 1e-4, "{tail} from the automaton, {rate} from derivations");
    }

    /// The mean information of samples equals the entropy within four standard errors.
    #[test]
    fn mean_information_equals_entropy() {
        let grammar = Grammar::new();
        for seq in [1, 16, 128] {
            let costs: Vec<f64> = (0..4000)
                .map(|key| {
                    let mut sample = vec![0; seq + 1];
                    grammar.sample(crate::random::hash(&[key, 99]), &mut sample);
                    grammar.information(&sample).iter().sum::<f64>() / seq as f64
                })
                .collect();
            let n = costs.len() as f64;
            let mean = costs.iter().sum::<f64>() / n;
            let variance = costs.iter().map(|c| (c - mean).powi(2)).sum::<f64>() / (n - 1.0);
            let error = (variance / n).sqrt();
            let floor = grammar.entropy(seq);
            assert!((mean - floor).abs() < 4.0 * error, "seq {seq}: {mean} ± {error}, not {floor}");
        }
    }

    #[test]
    fn text_outside_the_language_has_infinite_information() {
        let tokens = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
        let grammar = Grammar::new();
        let surprise = |text| grammar.information(&tokens(text)).iter().sum::<f64>();
        for right in
            ["the owl sings.\nthe", "do two owls sing?\n", "my cats that a dog sees nod.\n"]
        {
            assert!(surprise(right).is_finite(), "{right}");
        }
        for wrong in ["the owls sings.", "do two owls sing.", "does two owls", "a hen (a king "] {
            assert!(surprise(wrong).is_infinite(), "{wrong}");
        }
    }
}
