//! The pipe axis: executes a rank's actions of a schedule, receives the inputs of each from neighbouring stages and
//! sends its outputs. Knows nothing about what a stage computes.
//!
//! A message is the residual stream of one micro-batch, or its gradient: `(tokens, dim)`. In each step a rank sends
//! one for each forward of a stage that is not the last, and one for each backward of a stage that is not the first.

use std::sync::Arc;

use lockstep_comm::trace::CommAxis;
use lockstep_comm::{Group, Result};
use lockstep_kernels::{Device, Dtype, Tag, Tensor};
use lockstep_plan::GroupKind;
use lockstep_plan::schedule::{Action, PipelineStep, Schedule};

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
    /// This rank's actions and the messages around each.
    steps: Arc<[PipelineStep]>,
    /// Messages that arrived before they were needed.
    early: Vec<(Action, Tensor)>,
    /// For each step, the messages of this rank that have been received when those of the step have arrived.
    received: Arc<[Vec<Action>]>,
    /// Messages that may not have been received.
    sends: Vec<(Action, Transfer)>,
}

impl Pipeline {
    pub fn new(schedule: Schedule, groups: &Groups, message: MessageShape) -> Pipeline {
        let me = groups.coord.pipe;
        let (steps, received) = (schedule.steps(me).into(), schedule.received(me).into());
        Pipeline { schedule, message, me, steps, early: vec![], received, sends: vec![] }
    }

    /// Executes all actions of this rank: `execute` gets an action and its input, and returns the output to send.
    pub fn run(
        &mut self,
        device: &Device,
        groups: &Groups,
        mut execute: impl FnMut(Action, Option<Tensor>) -> Option<Tensor>,
    ) -> Result<()> {
        let group = groups.group(GroupKind::Pipe);
        self.early.clear();
        for (step, received) in self.steps.clone().iter().zip(self.received.clone().iter()) {
            let input = groups.timed(CommAxis::Pipe, || {
                let input = self.receive(device, group, step)?;
                self.free(received)?;
                Ok(input)
            })?;
            let output = execute(step.action, input);
            if let (Some(to), Some(output)) = (step.sends_to, output) {
                self.sends.push((step.action, send(device, group, to, output)));
            }
        }
        groups.timed(CommAxis::Pipe, || self.wait_for_sends())
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
        let mut sends = Vec::new();
        for stage in (self.me..stages).step_by(ranks) {
            let input = match stage {
                0 => None,
                _ => {
                    Some(self.receive_next(device, group, (stage - 1) % ranks, Tag::Activations)?)
                }
            };
            let output = execute(stage / ranks, input);
            if stage + 1 < stages {
                sends.push(send(device, group, (stage + 1) % ranks, output));
            }
        }
        sends.into_iter().try_for_each(|send| send.wait().map(drop))
    }

    /// Receives the messages of a step and returns the input of its action.
    fn receive(
        &mut self,
        device: &Device,
        group: &Group,
        step: &PipelineStep,
    ) -> Result<Option<Tensor>> {
        for message in &step.receives {
            let tag = if message.is_activation() { Tag::Activations } else { Tag::Buffers };
            let tensor = self.receive_next(device, group, message.from, tag)?;
            self.early.push((message.result_of, tensor));
        }
        let Some(input) = step.input else { return Ok(None) };
        let index = self.early.iter().position(|(action, _)| *action == input);
        Ok(Some(self.early.swap_remove(index.expect("the step receives its input")).1))
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
        collectives::receive(device, group, tensor.view_mut(), from)?;
        Ok(tensor)
    }

    /// Frees the tensors of messages that have been received. On a GPU, the message that proves it comes after the copy on
    /// the other rank's stream, so that nothing waits here. Freeing whatever happens to be complete would give tensors
    /// other addresses in every step, and lists of operations could not be started as one graph.
    fn free(&mut self, received: &[Action]) -> Result<()> {
        for action in received {
            let index = self.sends.iter().position(|(sent, _)| sent == action);
            self.sends.swap_remove(index.expect("the message was sent")).1.wait()?;
        }
        Ok(())
    }

    fn wait_for_sends(&mut self) -> Result<()> {
        let sends = std::mem::take(&mut self.sends);
        sends.into_iter().try_for_each(|(_, send)| send.wait().map(drop))
    }
}

fn send(device: &Device, group: &Group, to: usize, tensor: Tensor) -> Transfer {
    // The activation now belongs to the receiver.
    tensor.retag(Tag::Buffers);
    collectives::start_send(device, group, tensor, to)
}
