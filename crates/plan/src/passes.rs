//! What a rank does in one optimizer step, block by block and in order: its list of the schedule, walked through
//! its blocks as `model` walks it. Memory and traffic are read off it; nothing is computed here.

use crate::model::Part;
use crate::plan::Plan;
use crate::schedule::{Act, Action, Schedule};

/// Something that happens to a block, or between stages. Blocks are numbered as on the rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moment {
    /// A message of another stage has come, maybe before it is wanted: an activation, or a gradient.
    Received { forward: bool },
    /// Token ids become the stream.
    Embed { block: usize },
    /// A layer's forward pass.
    Forward { block: usize },
    /// The head's, where forward becomes backward. `table` is the block whose token table is its projection,
    /// when that is not its own.
    Turn { block: usize, table: Option<usize> },
    /// A layer's backward pass. Its weight gradients come with it, or `later`.
    Backward { block: usize, later: bool },
    /// Weight gradients of a layer that were put off.
    Weights { block: usize },
    /// The end of the backward pass.
    EmbedBackward { block: usize },
    /// The stream, or its gradient, is on its way to another stage.
    Passed { forward: bool },
}

/// The moments of a step of the rank that has this part.
pub(crate) fn moments(plan: &Plan, part: &Part) -> Vec<Moment> {
    let schedule = plan.schedule();
    let me = part.coord.pipe;
    let mut walk = Walk { part, mail: Mail::new(&schedule, me), moments: Vec::new() };
    for action in &schedule.actions[me] {
        walk.action(&schedule, *action);
    }
    walk.moments
}

struct Walk<'a> {
    part: &'a Part,
    mail: Mail,
    moments: Vec<Moment>,
}

impl Walk<'_> {
    fn action(&mut self, schedule: &Schedule, action: Action) {
        let stages = schedule.stages();
        if let Some(from) = action.takes_from(stages) {
            let come = self.mail.receive(schedule.rank_of(from.stage), from);
            self.moments.extend(come.into_iter().map(|forward| Moment::Received { forward }));
        }
        let chunk = action.stage / schedule.ranks;
        match action.act {
            Act::Forward => self.forward(chunk),
            Act::Backward => self.backward(chunk, false),
            Act::Input => self.backward(chunk, true),
            Act::Weights => {
                let layers = self.layers(chunk).rev();
                self.moments.extend(layers.map(|block| Moment::Weights { block }));
            }
        }
        if action.gives_to(stages).is_some() {
            self.moments.push(Moment::Passed { forward: action.act == Act::Forward });
        }
    }

    fn forward(&mut self, chunk: usize) {
        let first = self.part.stages[chunk].start;
        if self.part.is_first(first) {
            self.moments.push(Moment::Embed { block: first });
        }
        let layers = self.layers(chunk);
        self.moments.extend(layers.map(|block| Moment::Forward { block }));
    }

    fn backward(&mut self, chunk: usize, later: bool) {
        let stage = &self.part.stages[chunk];
        let (first, last) = (stage.start, stage.end - 1);
        if self.part.is_last(last) {
            let table = self.part.shared[last].as_ref().map(|shared| shared.block);
            self.moments.push(Moment::Turn { block: last, table });
        }
        let layers = self.layers(chunk).rev();
        self.moments.extend(layers.map(|block| Moment::Backward { block, later }));
        if self.part.is_first(first) {
            self.moments.push(Moment::EmbedBackward { block: first });
        }
    }

    /// A stage's layers.
    fn layers(&self, chunk: usize) -> std::ops::Range<usize> {
        let stage = &self.part.stages[chunk];
        let first = stage.start + usize::from(self.part.is_first(stage.start));
        first..stage.end - usize::from(self.part.is_last(stage.end - 1))
    }
}

/// Messages for a rank: between two ranks they come in the order of the sender's list, so that some come before
/// they are wanted.
struct Mail {
    /// From each rank, what it sends here, and how much of it has come.
    incoming: Vec<(Vec<Action>, usize)>,
    early: Vec<Action>,
}

impl Mail {
    fn new(schedule: &Schedule, me: usize) -> Mail {
        let stages = schedule.stages();
        let for_me = |action: &&Action| {
            action.gives_to(stages).is_some_and(|taker| schedule.rank_of(taker.stage) == me)
        };
        let lists = schedule.actions.iter();
        let incoming = lists.map(|list| (list.iter().filter(for_me).copied().collect(), 0));
        Mail { incoming: incoming.collect(), early: Vec::new() }
    }

    /// Of each message that is taken until the wanted one is there, whether it is an activation.
    fn receive(&mut self, rank: usize, wanted: Action) -> Vec<bool> {
        if let Some(at) = self.early.iter().position(|early| *early == wanted) {
            self.early.swap_remove(at);
            return Vec::new();
        }
        let mut come = Vec::new();
        loop {
            let (list, taken) = &mut self.incoming[rank];
            let next = list[*taken];
            *taken += 1;
            come.push(next.act == Act::Forward);
            if next == wanted {
                return come;
            }
            self.early.push(next);
        }
    }
}
