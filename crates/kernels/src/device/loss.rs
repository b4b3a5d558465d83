//! Cross-entropy of logits against targets.

use half::bf16;

use super::{Device, OpClass, with_float};
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
        self.on_cpu(OpClass::Loss, |cpu| match gradient {
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

/// What the ranks of a vocabulary have found together, each (rows), f32.
#[derive(Clone, Copy)]
pub struct Found<'a> {
    /// The largest logit.
    pub max: View<'a>,
    /// The sum of e^(logit - max).
    pub sum: View<'a>,
    /// The target's logit.
    pub target: View<'a>,
}

impl Device {
    /// Each row's largest logit of this share of the vocabulary.
    pub fn largest_logits(&self, logits: View<'_>, max: ViewMut<'_>) {
        self.on_cpu(OpClass::Loss, |cpu| cross_entropy::row_max(cpu, logits.host(), max.host()))
    }

    /// This share's part of each row's sum of e^(logit - max), and the target's logit where it is here,
    /// otherwise zero. The share's first logit is of token `first`.
    pub fn logit_sums(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        first: usize,
        max: View<'_>,
        sum: ViewMut<'_>,
        target: ViewMut<'_>,
    ) {
        self.on_cpu(OpClass::Loss, |cpu| {
            cross_entropy::row_sum(cpu, logits.host(), max.host(), sum.host());
            cross_entropy::target_logit(logits.host(), targets.host(), first, target.host());
        })
    }

    /// As `cross_entropy` for a share of the vocabulary, given what all shares have found.
    pub fn cross_entropy_share(&self, work: CrossEntropy<'_>, first: usize, found: Found<'_>) {
        let CrossEntropy { logits, targets, losses, gradient } = work;
        let found = cross_entropy::Found {
            max: found.max.host(),
            sum: found.sum.host(),
            target: found.target.host(),
        };
        let how = |scale| Loss { scale, z_loss: 0.0 };
        let targets = targets.host();
        self.on_cpu(OpClass::Loss, |cpu| {
            cross_entropy::finish_losses(&found, targets, how(0.0), losses.host());
            match gradient {
                Gradient::None => {}
                Gradient::InPlace(scale) => {
                    let logits = logits.host();
                    cross_entropy::finish_in_place(cpu, logits, &found, targets, first, how(scale));
                }
                Gradient::Into(place, scale) => with_float!(place.dtype(), E => {
                    let (logits, place) = (logits.as_view().host(), place.host::<E>());
                    cross_entropy::finish_into(cpu, logits, &found, targets, first, how(scale), place);
                }),
            }
        })
    }
}
