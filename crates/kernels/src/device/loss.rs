//! Cross-entropy of logits against targets, for a whole vocabulary or for shards of it.

use super::{Backend, Device, OpClass, with_float};
use crate::cpu::cross_entropy::{self, Loss, Targets};
use crate::cuda;
use crate::{View, ViewMut};

/// A target that is ignored: its loss and its gradient are zero.
pub const IGNORED: u32 = u32::MAX;

/// The loss of a chunk of tokens.
pub struct CrossEntropy<'a> {
    pub logits: ViewMut<'a>, // (rows, vocab), f32; on a GPU also bf16
    /// May contain `IGNORED`.
    pub targets: View<'a>, // (rows), u32
    /// Receives the loss of each row.
    pub losses: ViewMut<'a>, // (rows), f32
    pub gradient: LogitGradient<'a>,
}

/// Where the gradient of the logits is written, and its factor.
pub enum LogitGradient<'a> {
    /// No gradient: evaluation.
    None,
    /// Over the logits.
    InPlace(f32),
    /// Into another tensor, rounded to its dtype.
    Into(ViewMut<'a>, f32),
}

/// The logits of one shard of the vocabulary.
#[derive(Clone, Copy)]
pub struct LogitShard<'a> {
    pub logits: View<'a>,  // (rows, shard), f32
    pub targets: View<'a>, // (rows), u32, ids of the whole vocabulary
    /// Token id of the shard's first logit.
    pub first: usize,
}

/// Softmax statistics of each row over the whole vocabulary, each (rows), f32.
#[derive(Clone, Copy)]
pub struct SoftmaxStats<'a> {
    /// The largest logit.
    pub max: View<'a>,
    /// The sum of `exp(logit - max)`.
    pub sum: View<'a>,
    /// The target's logit.
    pub target: View<'a>,
}

impl Device {
    /// Loss of each row, and the gradient of its logits.
    pub fn cross_entropy(&self, work: CrossEntropy<'_>) {
        let CrossEntropy { logits, targets, losses, gradient } = work;
        self.execute(OpClass::Loss, |backend| match backend {
            Backend::Cpu(cpu) => {
                let (targets, losses) = (targets.host(), losses.host());
                match gradient {
                    LogitGradient::None => {
                        let logits = logits.as_view().host();
                        cross_entropy::losses(cpu, logits, targets, scaled(0.0), losses)
                    }
                    LogitGradient::InPlace(scale) => {
                        let logits = logits.host();
                        cross_entropy::in_place(cpu, logits, targets, scaled(scale), losses)
                    }
                    LogitGradient::Into(to, scale) => with_float!(to.dtype(), E => {
                        let (logits, to) = (logits.as_view().host(), to.host::<E>());
                        let targets = Targets { ids: targets, first: 0, how: scaled(scale) };
                        cross_entropy::into(cpu, logits, targets, losses, to)
                    }),
                }
            }
            Backend::Cuda(gpu) => {
                cuda::loss::cross_entropy(gpu, CrossEntropy { logits, targets, losses, gradient })
            }
        })
    }

    /// The largest logit of each row of a vocabulary shard.
    pub fn largest_logits(&self, logits: View<'_>, max: ViewMut<'_>) {
        self.execute(OpClass::Loss, |backend| match backend {
            Backend::Cpu(cpu) => cross_entropy::row_max(cpu, logits.host(), max.host()),
            Backend::Cuda(gpu) => cuda::loss::largest_logits(gpu, logits, max),
        })
    }

    /// This shard's part of each row's sum of `exp(logit - max)`, and the target's logit, or zero if the target is in
    /// another shard.
    pub fn logit_sums(
        &self,
        shard: LogitShard<'_>,
        max: View<'_>,
        sum: ViewMut<'_>,
        target: ViewMut<'_>,
    ) {
        let LogitShard { logits, targets, first } = shard;
        self.execute(OpClass::Loss, |backend| match backend {
            Backend::Cpu(cpu) => {
                cross_entropy::row_sum(cpu, logits.host(), max.host(), sum.host());
                cross_entropy::target_logit(logits.host(), targets.host(), first, target.host());
            }
            Backend::Cuda(gpu) => cuda::loss::logit_sums(gpu, shard, max, sum, target),
        })
    }

    /// `cross_entropy` for a vocabulary shard that starts at token id `first`, given the statistics of all shards.
    pub fn cross_entropy_shard(
        &self,
        work: CrossEntropy<'_>,
        first: usize,
        stats: SoftmaxStats<'_>,
    ) {
        let CrossEntropy { logits, targets, losses, gradient } = work;
        self.execute(OpClass::Loss, |backend| match backend {
            Backend::Cpu(cpu) => {
                let stats = cross_entropy::SoftmaxStats {
                    max: stats.max.host(),
                    sum: stats.sum.host(),
                    target: stats.target.host(),
                };
                let targets = targets.host();
                cross_entropy::finish_losses(&stats, targets, scaled(0.0), losses.host());
                match gradient {
                    LogitGradient::None => {}
                    LogitGradient::InPlace(scale) => {
                        let targets = Targets { ids: targets, first, how: scaled(scale) };
                        cross_entropy::finish_in_place(cpu, logits.host(), &stats, targets);
                    }
                    LogitGradient::Into(to, scale) => with_float!(to.dtype(), E => {
                        let (logits, to) = (logits.as_view().host(), to.host::<E>());
                        let targets = Targets { ids: targets, first, how: scaled(scale) };
                        cross_entropy::finish_into(cpu, logits, &stats, targets, to);
                    }),
                }
            }
            Backend::Cuda(gpu) => {
                let work = CrossEntropy { logits, targets, losses, gradient };
                cuda::loss::cross_entropy_shard(gpu, work, first, stats)
            }
        })
    }
}

/// A loss without z-loss.
fn scaled(scale: f32) -> Loss {
    Loss { scale, z_loss: 0.0 }
}
