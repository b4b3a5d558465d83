//! A phrase said over and over, as an automaton: after any prefix there is one state, and the state
//! knows how likely each next byte is. That makes prediction exact, and the entropy a sum.
//!
//! Phrases are first laid out as nodes that say a byte or split. After a prefix one may be at several
//! nodes, each with a probability (in the middle of `ca` of `cat` or `cart`): that belief is the state.
//! There are finitely many, because every sentence ends and its end leaves no doubt.

use super::phrase::{Phrase, shares};
use std::collections::{BTreeMap, HashMap};

/// What can follow, and how likely.
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

    /// What can follow in a state, by byte.
    pub fn arcs(&self, state: usize) -> &[Arc] {
        &self.states[state].arcs
    }

    /// The mean entropy of bytes 1 to `count`, in nats, for texts that start with a sentence, whose
    /// byte 0 is given: the expectation over the states one can be in, carried from byte to byte.
    pub fn entropy(&self, count: usize) -> f64 {
        let mut here = vec![0.0; self.states.len()];
        here[0] = 1.0;
        let mut sum = 0.0;
        for _ in 0..count {
            here = self.spread(&here);
            sum += here.iter().zip(&self.states).map(|(p, state)| p * state.entropy).sum::<f64>();
        }
        sum / count as f64
    }

    /// Where one is a byte later.
    fn spread(&self, here: &[f64]) -> Vec<f64> {
        let mut there = vec![0.0; here.len()];
        for (p, state) in here.iter().zip(&self.states).filter(|(p, _)| **p > 0.0) {
            for arc in &state.arcs {
                there[arc.to] += p * arc.probability;
            }
        }
        there
    }
}

/// Where in the phrase one may be, and how likely; only at nodes that say a byte.
struct Belief(Vec<(usize, f64)>);

impl Belief {
    /// Probabilities by their bits: two beliefs are one state only if they are exactly the same.
    fn key(&self) -> Vec<(usize, u64)> {
        self.0.iter().map(|(node, p)| (*node, p.to_bits())).collect()
    }
}

/// A phrase laid out, its end joined to its start.
struct Nodes {
    nodes: Vec<Node>,
    /// Where each node is, so that what goes on in the same way is laid out once.
    known: HashMap<Node, usize>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Node {
    Says(u8, usize),
    /// The bits of each probability, and where it leads.
    Splits(Vec<(u64, usize)>),
}

const ROOT: usize = 0;

impl Nodes {
    fn of(phrase: &Phrase) -> Nodes {
        let mut nodes = Nodes { nodes: Vec::new(), known: HashMap::new() };
        nodes.add(Node::Splits(Vec::new()));
        let first = nodes.lay(phrase, ROOT);
        nodes.nodes[ROOT] = Node::Splits(vec![(1f64.to_bits(), first)]);
        nodes
    }

    /// Lays `phrase` out in front of the node `next`; gives its first node.
    fn lay(&mut self, phrase: &Phrase, next: usize) -> usize {
        match phrase {
            Phrase::Text(text) => {
                text.bytes().rev().fold(next, |next, byte| self.add(Node::Says(byte, next)))
            }
            Phrase::Row(parts) => parts.iter().rev().fold(next, |next, part| self.lay(part, next)),
            Phrase::Choice(options) => {
                let ways =
                    shares(options).map(|(share, part)| (share.to_bits(), self.lay(part, next)));
                let ways = ways.collect();
                self.add(Node::Splits(ways))
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

    /// The belief after following all splits.
    fn settle(&self, from: impl IntoIterator<Item = (usize, f64)>) -> Belief {
        let mut open: Vec<(usize, f64)> = from.into_iter().collect();
        let mut settled = BTreeMap::new();
        while let Some((node, p)) = open.pop() {
            match &self.nodes[node] {
                Node::Says(..) => *settled.entry(node).or_insert(0.0) += p,
                Node::Splits(ways) => {
                    open.extend(ways.iter().map(|(share, to)| (*to, p * f64::from_bits(*share))));
                }
            }
        }
        Belief(settled.into_iter().collect())
    }

    /// The bytes that can be said, each with its probability and what is believed once it was.
    fn step(&self, belief: &Belief) -> Vec<(u8, f64, Belief)> {
        let mut said: BTreeMap<u8, Vec<(usize, f64)>> = BTreeMap::new();
        for (node, p) in &belief.0 {
            let Node::Says(byte, next) = self.nodes[*node] else {
                unreachable!("beliefs are settled")
            };
            said.entry(byte).or_default().push((next, *p));
        }
        let sum: f64 = belief.0.iter().map(|(_, p)| p).sum();
        said.into_iter()
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
    use super::super::phrase::{choice, row, text, word};
    use super::*;

    #[test]
    fn probabilities_sum_to_one_in_every_state() {
        let automaton = Automaton::repeating(&super::super::language::sentence());
        for (i, state) in automaton.states.iter().enumerate() {
            let sum: f64 = state.arcs.iter().map(|arc| arc.probability).sum();
            assert!((sum - 1.0).abs() < 1e-12, "state {i}: {sum}");
        }
    }

    /// A coin thrown over and over: one bit a byte, in one state.
    #[test]
    fn a_coin_has_one_bit() {
        let coin = choice([(1.0, text("h")), (1.0, text("t"))]);
        let automaton = Automaton::repeating(&coin);
        assert_eq!(automaton.states.len(), 1);
        assert!((automaton.entropy(10) - 2f64.ln()).abs() < 1e-12);
    }

    /// Words that begin alike: after `ca`, `t` and `r` are as likely as the words are.
    #[test]
    fn what_begins_alike_is_told_apart_where_it_differs() {
        let words = choice([(3.0, text("cat ")), (1.0, text("car "))]);
        let automaton = Automaton::repeating(&words);
        let after_ca = automaton.arcs(automaton.arcs(automaton.arcs(0)[0].to)[0].to);
        let shares: Vec<_> = after_ca.iter().map(|arc| (arc.byte, arc.probability)).collect();
        assert_eq!(shares, [(b'r', 0.25), (b't', 0.75)]);
    }

    /// Two ways to say the same are one to whoever predicts it: derivations have more entropy than text.
    #[test]
    fn an_ambiguous_phrase_costs_less_than_its_derivations() {
        let twice = choice([(1.0, text("ab.")), (1.0, row([text("a"), word(&["b."])]))]);
        assert!((twice.nats() - 2f64.ln()).abs() < 1e-12);
        assert_eq!(Automaton::repeating(&twice).entropy(30), 0.0);
    }
}
