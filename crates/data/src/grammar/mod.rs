//! `builtin:grammar`: endless text of a language of our own whose entropy is known exactly, so that a
//! training run can be held against the best that any model could do. See README.md beside this file.
//! Reads no file and holds no state: a sample follows from its key.

mod automaton;
mod language;
mod phrase;

use crate::chance::Dice;
use automaton::{Arc, Automaton};

/// The built-in language: its samples, and what they cost to predict.
///
/// ```
/// use lockstep_data::Grammar;
///
/// let grammar = Grammar::new();
/// let mut sample = [0; 65];
/// grammar.sample(7, &mut sample);
/// // What the best of all models would pay for this sample, and for samples in general.
/// let paid: f64 = grammar.information(&sample).iter().sum::<f64>() / 64.0;
/// let floor = grammar.entropy(64);
/// assert!((paid - floor).abs() < 0.3, "{paid} against {floor}");
/// ```
#[derive(Debug)]
pub struct Grammar {
    automaton: Automaton,
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
        Grammar { automaton: Automaton::repeating(&language::sentence()) }
    }

    /// Sentences under `key`, from the start of one, as many bytes as `out` holds.
    pub fn sample(&self, key: u64, out: &mut [u32]) {
        let mut dice = Dice::new(key);
        let mut state = 0;
        for token in out {
            let arc = self.drawn(state, dice.unit());
            (*token, state) = (arc.byte.into(), arc.to);
        }
    }

    /// The entropy of what there is to predict in a sample of `seq + 1` tokens, in nats per token: the
    /// lowest mean loss that any model can reach on such samples. Exact, but for rounding.
    pub fn entropy(&self, seq: usize) -> f64 {
        self.automaton.entropy(seq)
    }

    /// What `entropy(seq)` comes to for long samples: the entropy of a sentence over its mean length.
    pub fn rate(&self) -> f64 {
        let sentence = language::sentence();
        sentence.nats() / sentence.bytes()
    }

    /// Changes when the language does.
    pub fn identity(&self) -> String {
        let language = format!("{:?}", language::sentence());
        format!("grammar {}", &blake3::hash(language.as_bytes()).to_hex()[..16])
    }

    /// What each token of a sample after its first one tells, in nats: -ln p(token | all before it).
    /// Infinite from the first token on that the language does not allow.
    pub fn information(&self, sample: &[u32]) -> Vec<f64> {
        let mut state = Some(0);
        let told = sample.iter().map(|token| {
            let arcs = state.map_or(&[][..], |state| self.automaton.arcs(state));
            let arc = arcs.iter().find(|arc| u32::from(arc.byte) == *token);
            state = arc.map(|arc| arc.to);
            arc.map_or(f64::INFINITY, |arc| -arc.probability.ln())
        });
        told.skip(1).collect()
    }

    /// The arc that a number from 0 to 1 falls on.
    fn drawn(&self, state: usize, mut unit: f64) -> Arc {
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

    /// Two independent ways to the same number: the entropy of derivations over their length, and what
    /// the automaton says of a long text. They differ if a text had two derivations.
    #[test]
    fn the_language_is_unambiguous_and_its_entropy_rate_is_that_of_its_derivations() {
        let grammar = Grammar::new();
        let rate = grammar.rate();
        // The mean over n bytes approaches the rate like 1/n; the difference of two means drops the
        // part that comes from the start.
        let (short, long) = (4096, 8192);
        let tail = (grammar.entropy(long) * long as f64 - grammar.entropy(short) * short as f64)
            / (long - short) as f64;
        assert!((tail - rate).abs() < 1e-4, "{tail} from the automaton, {rate} from derivations");
    }

    /// The exact predictor's mean over samples is the stated entropy, within four standard errors.
    #[test]
    fn samples_cost_what_the_entropy_says() {
        let grammar = Grammar::new();
        for seq in [1, 16, 128] {
            let costs: Vec<f64> = (0..4000)
                .map(|key| {
                    let mut sample = vec![0; seq + 1];
                    grammar.sample(crate::chance::hash(&[key, 99]), &mut sample);
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
    fn what_is_not_said_in_the_language_is_infinitely_surprising() {
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
