//! Cross-entropy of logits against targets.

use half::bf16;

use super::{Device, Operation};
use crate::cpu::cross_entropy::{self, Loss};
use crate::{Dtype, View, ViewMut};

/// One chunk of tokens.
pub struct CrossEntropy<'a> {
    /// (rows, vocab), f32
    pub logits: ViewMut<'a>,
    /// (rows), u32; u32::MAX counts for nothing
    pub targets: View<'a>,
    /// (rows), f32: receives each row's loss
    pub losses: ViewMut<'a>,
    pub gradient: Gradient<'a>,
}

/// Where the gradient of the logits goes, times a factor.
pub enum Gradient<'a> {
    /// It is not wanted.
    None,
    /// Over the logits.
    InPlace(f32),
    /// Elsewhere, rounded to that place's type.
    Into(ViewMut<'a>, f32),
}

impl Device {
    /// The loss of each row, and the gradient of its logits where it is wanted.
    pub fn cross_entropy(&self, work: CrossEntropy<'_>) {
        let CrossEntropy { logits, targets, losses, gradient } = work;
        let how = |scale| Loss { scale, z_loss: 0.0 };
        let (targets, losses) = (targets.host(), losses.host());
        self.on_cpu(Operation::Loss, |cpu| match gradient {
            Gradient::None => {
                cross_entropy::losses(cpu, logits.as_view().host(), targets, how(0.0), losses)
            }
            Gradient::InPlace(scale) => {
                cross_entropy::in_place(cpu, logits.host(), targets, how(scale), losses)
            }
            Gradient::Into(place, scale) => {
                let logits = logits.as_view().host();
                match place.dtype() {
                    Dtype::Bf16 => cross_entropy::into::<bf16>(
                        cpu,
                        logits,
                        targets,
                        how(scale),
                        losses,
                        place.host(),
                    ),
                    _ => cross_entropy::into::<f32>(
                        cpu,
                        logits,
                        targets,
                        how(scale),
                        losses,
                        place.host(),
                    ),
                }
            }
        })
    }
}
