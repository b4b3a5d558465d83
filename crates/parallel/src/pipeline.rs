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
    sends: Vec<Transfer>,
}

impl Pipeline {
    pub fn new(schedule: Schedule, groups: &Groups, message: MessageShape) -> Pipeline {
        let me = groups.coord.pipe;
        let steps = schedule.steps(me).into();
        Pipeline { schedule, message, me, steps, early: vec![], sends: vec![] }
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
        for step in self.steps.clone().iter() {
            let input = groups.timed(CommAxis::Pipe, || self.receive(device, group, step))?;
            let output = execute(step.action, input);
            if let (Some(to), Some(output)) = (step.sends_to, output) {
                self.send(device, group, to, output)?;
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
        for stage in (self.me..stages).step_by(ranks) {
            let input = match stage {
                0 => None,
                _ => {
                    Some(self.receive_next(device, group, (stage - 1) % ranks, Tag::Activations)?)
                }
            };
            let output = execute(stage / ranks, input);
            if stage + 1 < stages {
                self.send(device, group, (stage + 1) % ranks, output)?;
            }
        }
        self.wait_for_sends()
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

    fn send(&mut self, device: &Device, group: &Group, to: usize, tensor: Tensor) -> Result<()> {
        self.drop_complete_sends()?;
        // The activation now belongs to the receiver; how long the buffer lives depends on when it receives.
        tensor.retag(Tag::Buffers);
        self.sends.push(collectives::start_send(device, group, tensor, to));
        Ok(())
    }

    /// Frees the tensors of complete sends. Others stay: on a GPU, the receiver's copy may not have begun.
    fn drop_complete_sends(&mut self) -> Result<()> {
        for index in (0..self.sends.len()).rev() {
            if let Some(send) = self.sends.swap_remove(index).unless_done()? {
                self.sends.push(send);
            }
        }
        Ok(())
    }

    fn wait_for_sends(&mut self) -> Result<()> {
        std::mem::take(&mut self.sends).into_iter().try_for_each(|send| send.wait().map(drop))
    }
}
