//! The automaton of a repeated phrase: every prefix leads to one state, which has the probability of each next byte.
//! Prediction is exact, and the entropy is a sum.
//!
//! A phrase is first compiled to nodes that emit a byte or branch. A prefix may lead to several nodes with different
//! probabilities (`ca` may be the start of `cat` or `cart`); this belief is the state. There are finitely many because
//! every sentence ends in a known state.

use super::phrase::{Phrase, probabilities};
use std::collections::{BTreeMap, HashMap};

/// A deterministic automaton with transition probabilities.
#[derive(Debug)]
pub struct Automaton {
    /// State 0 is the start of a sentence.
    states: Vec<State>,
}

#[derive(Debug)]
struct State {
    arcs: Vec<Arc>,
    /// The entropy of the next byte, in nats.
    entropy: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Arc {
    pub byte: u8,
    pub probability: f64,
    pub to: usize,
}

impl Automaton {
    pub fn repeating(phrase: &Phrase) -> Automaton {
        let nodes = Nodes::of(phrase);
        let mut known = HashMap::new();
        let mut beliefs = vec![nodes.settle([(ROOT, 1.0)])];
        known.insert(beliefs[0].key(), 0);
        let mut states = Vec::new();
        while states.len() < beliefs.len() {
            let arcs =
                nodes.step(&beliefs[states.len()]).into_iter().map(|(byte, share, belief)| {
                    let new = beliefs.len();
                    let to = *known.entry(belief.key()).or_insert(new);
                    if to == new {
                        beliefs.push(belief);
                    }
                    Arc { byte, probability: share, to }
                });
            let arcs: Vec<_> = arcs.collect();
            let entropy = arcs.iter().map(|arc| -arc.probability * arc.probability.ln()).sum();
            states.push(State { arcs, entropy });
        }
        Automaton { states }
    }

    /// The arcs of a state, sorted by byte.
    pub fn arcs(&self, state: usize) -> &[Arc] {
        &self.states[state].arcs
    }

    /// Mean entropy of bytes 1 to `count` in nats, for texts that start with a sentence and whose byte 0 is given. The
    /// distribution over states is propagated byte by byte.
    pub fn entropy(&self, count: usize) -> f64 {
        let mut here = vec![0.0; self.states.len()];
        here[0] = 1.0;
        let mut sum = 0.0;
        for _ in 0..count {
            here = self.advance(&here);
            sum += here.iter().zip(&self.states).map(|(p, state)| p * state.entropy).sum::<f64>();
        }
        sum / count as f64
    }

    /// The distribution over states one byte later.
    fn advance(&self, here: &[f64]) -> Vec<f64> {
        let mut there = vec![0.0; here.len()];
        for (p, state) in here.iter().zip(&self.states).filter(|(p, _)| **p > 0.0) {
            for arc in &state.arcs {
                there[arc.to] += p * arc.probability;
            }
        }
        there
    }
}

/// A distribution over nodes that emit a byte.
struct Belief(Vec<(usize, f64)>);

impl Belief {
    /// Two beliefs are the same state only if their probabilities are equal bit for bit.
    fn key(&self) -> Vec<(usize, u64)> {
        self.0.iter().map(|(node, p)| (*node, p.to_bits())).collect()
    }
}

/// The nodes of a phrase whose end is connected to its start.
struct Nodes {
    nodes: Vec<Node>,
    /// Index of each node; equal nodes are shared.
    known: HashMap<Node, usize>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Node {
    Emit(u8, usize),
    /// Probability bits and target of each branch.
    Branch(Vec<(u64, usize)>),
}

const ROOT: usize = 0;

impl Nodes {
    fn of(phrase: &Phrase) -> Nodes {
        let mut nodes = Nodes { nodes: Vec::new(), known: HashMap::new() };
        nodes.add(Node::Branch(Vec::new()));
        let first = nodes.compile(phrase, ROOT);
        nodes.nodes[ROOT] = Node::Branch(vec![(1f64.to_bits(), first)]);
        nodes
    }

    /// Compiles `phrase` in front of the node `next`. Returns its first node.
    fn compile(&mut self, phrase: &Phrase, next: usize) -> usize {
        match phrase {
            Phrase::Text(text) => {
                text.bytes().rev().fold(next, |next, byte| self.add(Node::Emit(byte, next)))
            }
            Phrase::Row(parts) => {
                parts.iter().rev().fold(next, |next, part| self.compile(part, next))
            }
            Phrase::Choice(options) => {
                let ways = probabilities(options)
                    .map(|(share, part)| (share.to_bits(), self.compile(part, next)));
                let ways = ways.collect();
                self.add(Node::Branch(ways))
            }
        }
    }

    fn add(&mut self, node: Node) -> usize {
        let new = self.nodes.len();
        let at = *self.known.entry(node.clone()).or_insert(new);
        if at == new {
            self.nodes.push(node);
        }
        at
    }

    /// Follows all branches.
    fn settle(&self, from: impl IntoIterator<Item = (usize, f64)>) -> Belief {
        let mut open: Vec<(usize, f64)> = from.into_iter().collect();
        let mut settled = BTreeMap::new();
        while let Some((node, p)) = open.pop() {
            match &self.nodes[node] {
                Node::Emit(..) => *settled.entry(node).or_insert(0.0) += p,
                Node::Branch(ways) => {
                    open.extend(ways.iter().map(|(share, to)| (*to, p * f64::from_bits(*share))));
                }
            }
        }
        Belief(settled.into_iter().collect())
    }

    /// The possible next bytes, each with its probability and the resulting belief.
    fn step(&self, belief: &Belief) -> Vec<(u8, f64, Belief)> {
        let mut emitted: BTreeMap<u8, Vec<(usize, f64)>> = BTreeMap::new();
        for (node, p) in &belief.0 {
            let Node::Emit(byte, next) = self.nodes[*node] else {
                unreachable!("beliefs are settled")
            };
            emitted.entry(byte).or_default().push((next, *p));
        }
        let sum: f64 = belief.0.iter().map(|(_, p)| p).sum();
        emitted
            .into_iter()
            .map(|(byte, places)| {
                let share: f64 = places.iter().map(|(_, p)| p).sum();
                let after = self.settle(places.iter().map(|(node, p)| (*node, p / share)));
                (byte, share / sum, after)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::phrase::{choice, sequence, text, word};
    use super::*;

    #[test]
    fn probabilities_sum_to_one_in_every_state() {
        let automaton = Automaton::repeating(&super::super::language::sentence());
        for (i, state) in automaton.states.iter().enumerate() {
            let sum: f64 = state.arcs.iter().map(|arc| arc.probability).sum();
            assert!((sum - 1.0).abs() < 1e-12, "state {i}: {sum}");
        }
    }

    #[test]
    fn a_fair_coin_has_one_bit_and_one_state() {
        let coin = choice([(1.0, text("h")), (1.0, text("t"))]);
        let automaton = Automaton::repeating(&coin);
        assert_eq!(automaton.states.len(), 1);
        assert!((automaton.entropy(10) - 2f64.ln()).abs() < 1e-12);
    }

    /// After `ca`, the probabilities of `t` and `r` are those of the words.
    #[test]
    fn words_with_a_common_prefix_share_states() {
        let words = choice([(3.0, text("cat ")), (1.0, text("car "))]);
        let automaton = Automaton::repeating(&words);
        let after_ca = automaton.arcs(automaton.arcs(automaton.arcs(0)[0].to)[0].to);
        let shares: Vec<_> = after_ca.iter().map(|arc| (arc.byte, arc.probability)).collect();
        assert_eq!(shares, [(b'r', 0.25), (b't', 0.75)]);
    }

    /// Two derivations of the same text: the derivation has more entropy than the text.
    #[test]
    fn ambiguous_text_has_less_entropy_than_its_derivations() {
        let twice = choice([(1.0, text("ab.")), (1.0, sequence([text("a"), word(&["b."])]))]);
        assert!((twice.nats() - 2f64.ln()).abs() < 1e-12);
        assert_eq!(Automaton::repeating(&twice).entropy(30), 0.0);
    }
}
