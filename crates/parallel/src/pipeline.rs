//! The pipe axis: executes a rank's actions of a schedule, receives the inputs of each from neighbouring stages and
//! sends its outputs. Knows nothing about what a stage computes.
//!
//! A message is the residual stream of one micro-batch, or its gradient: `(tokens, dim)`. In each step a rank sends
//! one for each forward of a stage that is not the last, and one for each backward of a stage that is not the first.

use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::GroupKind;
use lockstep_plan::schedule::{Act, Action, Schedule};

use crate::Groups;
use crate::collectives::{self, Transfer};

/// Shape of the messages between stages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MessageShape {
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
}

/// A rank's position in a pipeline, and its messages in flight.
pub struct Pipeline {
    schedule: Schedule,
    message: MessageShape,
    me: usize,
    /// For each rank: the actions whose outputs it sends here, in order, and how many have arrived.
    incoming: Vec<(Vec<Action>, usize)>,
    /// Messages that arrived before they were needed.
    early: Vec<(Action, Tensor)>,
    sends: Vec<Transfer>,
}

impl Pipeline {
    pub fn new(schedule: Schedule, groups: &Groups, message: MessageShape) -> Pipeline {
        let (me, stages) = (groups.coord.pipe, schedule.stages());
        let for_me = |action: &&Action| {
            action.gives_to(stages).is_some_and(|taker| schedule.rank_of(taker.stage) == me)
        };
        let incoming = schedule
            .actions
            .iter()
            .map(|list| (list.iter().filter(for_me).copied().collect(), 0))
            .collect();
        Pipeline { schedule, message, me, incoming, early: vec![], sends: vec![] }
    }

    /// Executes all actions of this rank: `execute` gets an action and its input, and returns the output to send.
    pub fn run(
        &mut self,
        device: &Device,
        groups: &Groups,
        mut execute: impl FnMut(Action, Option<Tensor>) -> Option<Tensor>,
    ) -> Result<()> {
        let (group, stages) = (groups.group(GroupKind::Pipe), self.schedule.stages());
        self.incoming.iter_mut().for_each(|(_, arrived)| *arrived = 0);
        for index in 0..self.schedule.actions[self.me].len() {
            let action = self.schedule.actions[self.me][index];
            let input = match action.takes_from(stages) {
                Some(from) => Some(groups.timed(|| self.receive(device, group, from))?),
                None => None,
            };
            let output = execute(action, input);
            if let (Some(to), Some(output)) = (action.gives_to(stages), output) {
                self.send(group, self.schedule.rank_of(to.stage), output);
            }
        }
        groups.timed(|| self.wait_for_sends())
    }

    /// Runs one forward pass through all stages, outside the schedule.
    pub fn forward(
        &mut self,
        device: &Device,
        groups: &Groups,
        mut execute: impl FnMut(usize, Option<Tensor>) -> Tensor,
    ) -> Result<()> {
        let group = groups.group(GroupKind::Pipe);
        let (ranks, stages) = (self.schedule.ranks, self.schedule.stages());
        for stage in (self.me..stages).step_by(ranks) {
            let input = match stage {
                0 => None,
                _ => {
                    Some(self.receive_next(device, group, (stage - 1) % ranks, Tag::Activations)?)
                }
            };
            let output = execute(stage / ranks, input);
            if stage + 1 < stages {
                self.send(group, (stage + 1) % ranks, output);
            }
        }
        self.wait_for_sends()
    }

    /// The output of an action of another stage. Messages between two ranks arrive in the order of the sender's
    /// actions; those that are not needed yet are stored.
    fn receive(&mut self, device: &Device, group: &Group, from: Action) -> Result<Tensor> {
        if let Some(index) = self.early.iter().position(|(action, _)| *action == from) {
            return Ok(self.early.swap_remove(index).1);
        }
        let rank = self.schedule.rank_of(from.stage);
        loop {
            let (list, arrived) = &mut self.incoming[rank];
            let next = list[*arrived];
            *arrived += 1;
            let tag = if next.act == Act::Forward { Tag::Activations } else { Tag::Buffers };
            let tensor = self.receive_next(device, group, rank, tag)?;
            if next == from {
                return Ok(tensor);
            }
            self.early.push((next, tensor));
        }
    }

    fn receive_next(
        &self,
        device: &Device,
        group: &Group,
        from: usize,
        tag: Tag,
    ) -> Result<Tensor> {
        let MessageShape { rows, cols, dtype } = self.message;
        let mut tensor = device.empty(rows, cols, dtype, tag);
        collectives::receive(group, tensor.view_mut(), from)?;
        Ok(tensor)
    }

    fn send(&mut self, group: &Group, to: usize, tensor: Tensor) {
        self.sends.retain(|send| !send.is_done());
        // The activation now belongs to the receiver; how long the buffer lives depends on when it receives.
        tensor.retag(Tag::Buffers);
        self.sends.push(collectives::start_send(group, tensor, to));
    }

    fn wait_for_sends(&mut self) -> Result<()> {
        std::mem::take(&mut self.sends).into_iter().try_for_each(|send| send.wait().map(drop))
    }
}
