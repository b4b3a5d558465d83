//! The pipe axis: walks a rank's list of a schedule, taking in what neighbouring stages give and passing on
//! what they wait for. Knows nothing of what a stage does.
//!
//! A message is the residual stream of one micro-batch, or its gradient: `(tokens, dim)`. Per step a rank sends
//! one for each forward of a stage that is not the last, and one for each backward of one that is not the first.

use half::bf16;
use lockstep_comm::{Group, Pending, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::GroupKind;
use lockstep_plan::schedule::{Act, Action, Schedule};

use crate::Groups;

/// What messages look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    pub rows: usize,
    pub cols: usize,
    pub dtype: Dtype,
}

/// A rank's place in a pipeline, and what is under way.
pub struct Pipeline {
    schedule: Schedule,
    stream: Stream,
    me: usize,
    /// From each rank, what it sends here, in order, and how much of it has come.
    incoming: Vec<(Vec<Action>, usize)>,
    /// Came before it was wanted.
    early: Vec<(Action, Tensor)>,
    sending: Vec<Pending<Result<Message>>>,
}

impl Pipeline {
    pub fn new(schedule: Schedule, groups: &Groups, stream: Stream) -> Pipeline {
        let (me, stages) = (groups.coord.pipe, schedule.stages());
        let for_me = |action: &&Action| {
            action.gives_to(stages).is_some_and(|taker| schedule.rank_of(taker.stage) == me)
        };
        let incoming = schedule
            .actions
            .iter()
            .map(|list| (list.iter().filter(for_me).copied().collect(), 0))
            .collect();
        Pipeline { schedule, stream, me, incoming, early: vec![], sending: vec![] }
    }

    /// Does everything on the rank's list: `work` is given an action and what it takes in, and gives what is
    /// passed on.
    pub fn walk(
        &mut self,
        device: &Device,
        groups: &Groups,
        mut work: impl FnMut(Action, Option<Tensor>) -> Option<Tensor>,
    ) -> Result<()> {
        let (group, stages) = (groups.group(GroupKind::Pipe), self.schedule.stages());
        self.incoming.iter_mut().for_each(|(_, come)| *come = 0);
        for index in 0..self.schedule.actions[self.me].len() {
            let action = self.schedule.actions[self.me][index];
            let input = match action.takes_from(stages) {
                Some(from) => Some(groups.exchanged(|| self.receive(device, group, from))?),
                None => None,
            };
            let output = work(action, input);
            if let (Some(to), Some(output)) = (action.gives_to(stages), output) {
                self.send(group, self.schedule.rank_of(to.stage), output);
            }
        }
        // What is passed on lives until it is taken.
        let sending = std::mem::take(&mut self.sending);
        groups.exchanged(|| sending.into_iter().try_for_each(|pending| pending.wait().map(drop)))
    }

    /// A forward pass through all stages of something outside the schedule.
    pub fn forward(
        &mut self,
        device: &Device,
        groups: &Groups,
        mut work: impl FnMut(usize, Option<Tensor>) -> Tensor,
    ) -> Result<()> {
        let group = groups.group(GroupKind::Pipe);
        let (ranks, stages) = (self.schedule.ranks, self.schedule.stages());
        for stage in (self.me..stages).step_by(ranks) {
            let input = match stage {
                0 => None,
                _ => Some(self.take(device, group, (stage - 1) % ranks, Tag::Activations)?),
            };
            let output = work(stage / ranks, input);
            if stage + 1 < stages {
                self.send(group, (stage + 1) % ranks, output);
            }
        }
        let sending = std::mem::take(&mut self.sending);
        sending.into_iter().try_for_each(|pending| pending.wait().map(drop))
    }

    /// What an action of another stage gave. Between two ranks messages come in the order of the sender's
    /// list; those that are not wanted yet are put aside.
    fn receive(&mut self, device: &Device, group: &Group, from: Action) -> Result<Tensor> {
        if let Some(at) = self.early.iter().position(|(action, _)| *action == from) {
            return Ok(self.early.swap_remove(at).1);
        }
        let rank = self.schedule.rank_of(from.stage);
        loop {
            let (list, come) = &mut self.incoming[rank];
            let next = list[*come];
            *come += 1;
            let tag = if next.act == Act::Forward { Tag::Activations } else { Tag::Buffers };
            let tensor = self.take(device, group, rank, tag)?;
            if next == from {
                return Ok(tensor);
            }
            self.early.push((next, tensor));
        }
    }

    fn take(&self, device: &Device, group: &Group, from: usize, tag: Tag) -> Result<Tensor> {
        let Stream { rows, cols, dtype } = self.stream;
        let mut tensor = device.empty(rows, cols, dtype, tag);
        match dtype {
            Dtype::Bf16 => group.receive(tensor.view_mut().host::<bf16>(), from)?,
            _ => group.receive(tensor.view_mut().host::<f32>(), from)?,
        }
        Ok(tensor)
    }

    fn send(&mut self, group: &Group, to: usize, tensor: Tensor) {
        self.sending.retain(|pending| !pending.is_done());
        // It is nobody's activation any more, and how long it takes depends on who receives it.
        tensor.retag(Tag::Buffers);
        let message = Message(tensor);
        self.sending.push(match message.0.dtype() {
            Dtype::Bf16 => group.start_send::<bf16, _>(message, to),
            _ => group.start_send::<f32, _>(message, to),
        });
    }
}

/// A tensor that can be handed to a started call.
pub(crate) struct Message(pub Tensor);

macro_rules! message {
    ($type:ty) => {
        impl AsRef<[$type]> for Message {
            fn as_ref(&self) -> &[$type] {
                self.0.view().host()
            }
        }

        impl AsMut<[$type]> for Message {
            fn as_mut(&mut self) -> &mut [$type] {
                self.0.view_mut().host()
            }
        }
    };
}

message!(f32);
message!(bf16);
