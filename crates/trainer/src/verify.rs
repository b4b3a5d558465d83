//! Compares short training runs on different layouts: losses and parameters must agree.

use lockstep_comm::Group;
use lockstep_data::Source;
use lockstep_kernels::Device;
use lockstep_plan::{Compression, Dtype, Plan, Precision};

use crate::{Error, HostTensors, Rank, on_rank_zero};

/// Losses and gradient norms of each step, and the final parameters.
pub struct Trajectory {
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    pub params: HostTensors,
}

/// Relative differences between two trajectories.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// Largest relative difference of any step.
    pub loss: f64,
    /// Largest relative difference of any step.
    pub grad_norm: f64,
    /// L2 norm of the difference of all parameters, relative to the norm of the first.
    pub weights: f64,
    /// First tensor whose relative difference exceeds the tolerance, and that difference.
    pub tensor: Option<(String, f64)>,
}

/// Largest accepted differences.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    pub loss: f64,
    pub weights: f64,
}

impl Tolerance {
    /// Sums in a different order.
    pub const F32: Tolerance = Tolerance { loss: 2e-5, weights: 1e-4 };
    /// Rounding to 8 bits in different places.
    pub const BF16: Tolerance = Tolerance { loss: 2e-2, weights: 5e-2 };
    /// Gradients rounded to 1/127 of their block's maximum, with error feedback.
    pub const INT8: Tolerance = Tolerance { loss: 2e-2, weights: 1e-1 };
    /// Most of the gradient is delayed by error feedback; a few steps show little more than that the loss falls.
    pub const TOP_K: Tolerance = Tolerance { loss: 4e-1, weights: 6e-1 };

    /// Tolerance for `steps` steps of a plan, compared with one rank, which does not compress gradients.
    pub fn of(plan: &Plan, steps: u64) -> Tolerance {
        let Precision { compute, gradients, .. } = plan.precision;
        match plan.compression(steps as usize) {
            Compression::TopK(_) => Tolerance::TOP_K,
            Compression::Int8 => Tolerance::INT8,
            Compression::Bf16 | Compression::F16 => Tolerance::BF16,
            Compression::None if [compute, gradients].contains(&Dtype::Bf16) => Tolerance::BF16,
            Compression::None => Tolerance::F32,
        }
    }
}

/// Inputs of a short training run.
#[derive(Clone, Copy)]
pub struct Trial<'a> {
    pub plan: &'a Plan,
    pub source: &'a Source,
    pub steps: u64,
    /// Creates the device of a rank.
    pub device: &'a (dyn Fn() -> Device + Sync),
}

/// Trains `steps` steps on the ranks of a group. Returns the trajectory on rank 0 and `None` on the others. Calls
/// `on_step` after each step. Collective.
pub fn train(
    trial: Trial<'_>,
    group: &Group,
    on_step: &mut dyn FnMut(u64),
) -> Result<Option<Trajectory>, Error> {
    let Trial { plan, source, steps, device } = trial;
    let mut rank = Rank::new(plan, group, device())?;
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for step in 1..=steps {
        let stepped = rank.step(source, step)?;
        losses.push(stepped.loss);
        grad_norms.push(stepped.grad_norm);
        on_step(step);
    }
    rank.settle();
    let params = rank.params()?;
    Ok(params.map(|params| Trajectory { losses, grad_norms, params }))
}

/// Like [`train`], on the first `plan.ranks` ranks of a larger group. The other ranks wait. Collective.
pub fn train_on_first_ranks(
    trial: Trial<'_>,
    group: &Group,
    on_step: &mut dyn FnMut(u64),
) -> Result<Option<Trajectory>, Error> {
    let plan = trial.plan;
    let works = group.rank() < plan.ranks;
    let workers: Vec<usize> = (0..plan.ranks).collect();
    let workers = group.subgroup(if works { &workers } else { &[] }, "workers")?;
    // Rank 0 is in both groups, so that the idle ranks can wait for it.
    let idle: Vec<usize> = std::iter::once(0).chain(plan.ranks..group.size()).collect();
    let waits = idle.contains(&group.rank());
    let idle = group.subgroup(if waits { &idle } else { &[] }, "idle")?;
    let mut work = || match &workers {
        Some(workers) => train(trial, workers, on_step),
        None => Ok(None),
    };
    match &idle {
        Some(idle) => Ok(on_rank_zero(idle, work)?.flatten()),
        None => work(),
    }
}

impl Trajectory {
    /// Difference of `other` from this trajectory.
    pub fn difference(&self, other: &Trajectory, tolerance: &Tolerance) -> Difference {
        let relative = |a: &[f64], b: &[f64]| {
            let difference = |(a, b): (&f64, &f64)| (a - b).abs() / a.abs().max(f64::MIN_POSITIVE);
            a.iter().zip(b).map(difference).fold(0.0, max_or_nan)
        };
        let mut all = [0.0; 2];
        let mut tensor = None;
        for named in self.params.names() {
            let (a, b) = (self.params.get(&named.name), other.params.get(&named.name));
            let squares = [
                a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum::<f64>(),
                a.iter().map(|a| (*a as f64).powi(2)).sum::<f64>(),
            ];
            let difference = (squares[0] / squares[1].max(f64::MIN_POSITIVE)).sqrt();
            let exceeds = difference > tolerance.weights || difference.is_nan();
            if tensor.is_none() && exceeds {
                tensor = Some((named.name.clone(), difference));
            }
            all = [all[0] + squares[0], all[1] + squares[1]];
        }
        Difference {
            loss: relative(&self.losses, &other.losses),
            grad_norm: relative(&self.grad_norms, &other.grad_norms),
            weights: (all[0] / all[1]).sqrt(),
            tensor,
        }
    }
}

impl Difference {
    /// Returns whether losses and weights differ by no more than the tolerance.
    pub fn within(&self, tolerance: &Tolerance) -> bool {
        self.loss <= tolerance.loss && self.weights <= tolerance.weights
    }
}

/// The maximum, or NaN if either is NaN.
fn max_or_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
