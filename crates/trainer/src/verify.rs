//! The same training on other layouts: does it come to the same losses and the same parameters?

use lockstep_comm::{Group, Options, on_threads_with};
use lockstep_data::Source;
use lockstep_kernels::Device;
use lockstep_plan::{Compression, Dtype, Plan, Precision};

use crate::{Error, Rank, Whole, on_rank_zero};

/// A few steps of a run.
pub struct Trajectory {
    /// Of each step.
    pub losses: Vec<f64>,
    pub grad_norms: Vec<f64>,
    /// After the last.
    pub params: Whole,
}

/// How far two courses are apart.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// The largest of any step, relative.
    pub loss: f64,
    pub grad_norm: f64,
    /// Of all parameters together: the length of the difference by the length of the first.
    pub weights: f64,
    /// The first tensor that is farther away than `tolerance` by the same measure, and how far.
    pub tensor: Option<(String, f64)>,
}

/// What is still the same training.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    pub loss: f64,
    pub weights: f64,
}

impl Tolerance {
    /// Sums in another order.
    pub const F32: Tolerance = Tolerance { loss: 2e-5, weights: 1e-4 };
    /// Roundings to eight bits in other places.
    pub const BF16: Tolerance = Tolerance { loss: 2e-2, weights: 5e-2 };
    /// Gradients rounded to a 127th of the largest near them, and put right a step later.
    pub const INT8: Tolerance = Tolerance { loss: 2e-2, weights: 1e-1 };
    /// Most of the gradient comes so late that a few steps tell little more than that something is learned.
    pub const LATE: Tolerance = Tolerance { loss: 4e-1, weights: 6e-1 };

    /// Of some steps of a plan, beside the same on one rank, which compresses nothing.
    pub fn of(plan: &Plan, steps: u64) -> Tolerance {
        let Precision { compute, gradients } = plan.precision;
        match plan.compression(steps as usize) {
            Compression::TopK(_) => Tolerance::LATE,
            Compression::Int8 => Tolerance::INT8,
            Compression::Bf16 | Compression::F16 => Tolerance::BF16,
            Compression::None if [compute, gradients].contains(&Dtype::Bf16) => Tolerance::BF16,
            Compression::None => Tolerance::F32,
        }
    }
}

/// A short training to compare.
#[derive(Clone, Copy)]
pub struct Trial<'a> {
    pub plan: &'a Plan,
    pub source: &'a Source,
    pub steps: u64,
    /// Creates the device of a rank.
    pub device: &'a (dyn Fn() -> Device + Sync),
}

/// Trains `steps` steps as one of the ranks of a group; gives what came of it at the first. `told` hears of each
/// step that is done.
pub fn train(
    trial: Trial<'_>,
    group: &Group,
    told: &mut dyn FnMut(u64),
) -> Result<Option<Trajectory>, Error> {
    let Trial { plan, source, steps, device } = trial;
    let mut rank = Rank::new(plan, group, device())?;
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for step in 1..=steps {
        let stepped = rank.step(source, step)?;
        losses.push(stepped.loss);
        grad_norms.push(stepped.grad_norm);
        told(step);
    }
    let params = rank.params()?;
    Ok(params.map(|params| Trajectory { losses, grad_norms, params }))
}

/// The same on the first ranks of a group, as many as the plan takes; the others wait, however long that is. All
/// ranks call it.
pub fn train_on_first_ranks(
    trial: Trial<'_>,
    group: &Group,
    told: &mut dyn FnMut(u64),
) -> Result<Option<Trajectory>, Error> {
    let plan = trial.plan;
    let works = group.rank() < plan.ranks;
    let workers: Vec<usize> = (0..plan.ranks).collect();
    let workers = group.subgroup(if works { &workers } else { &[] }, "workers")?;
    // The first rank is in both: it keeps those company that have nothing to do.
    let idle: Vec<usize> = std::iter::once(0).chain(plan.ranks..group.size()).collect();
    let waits = idle.contains(&group.rank());
    let idle = group.subgroup(if waits { &idle } else { &[] }, "idle")?;
    let mut work = || match &workers {
        Some(workers) => train(trial, workers, told),
        None => Ok(None),
    };
    match &idle {
        Some(idle) => Ok(on_rank_zero(idle, work)?.flatten()),
        None => work(),
    }
}

/// The same with all ranks as threads of this process.
pub fn train_on_threads(trial: Trial<'_>, options: &Options) -> Result<Trajectory, Error> {
    let ranks =
        on_threads_with(options, trial.plan.ranks, |world| train(trial, &world, &mut |_| {}));
    let mut first = None;
    for rank in ranks {
        first = first.or(rank?);
    }
    Ok(first.expect("the first rank tells"))
}

impl Trajectory {
    /// How far `other` is from this one.
    pub fn difference(&self, other: &Trajectory, tolerance: &Tolerance) -> Difference {
        let relative = |a: &[f64], b: &[f64]| {
            let apart = |(a, b): (&f64, &f64)| (a - b).abs() / a.abs().max(f64::MIN_POSITIVE);
            a.iter().zip(b).map(apart).fold(0.0, larger)
        };
        let mut all = [0.0; 2];
        let mut tensor = None;
        for named in self.params.names() {
            let (a, b) = (self.params.get(&named.name), other.params.get(&named.name));
            let squares = [
                a.iter().zip(b).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum::<f64>(),
                a.iter().map(|a| (*a as f64).powi(2)).sum::<f64>(),
            ];
            let far = (squares[0] / squares[1].max(f64::MIN_POSITIVE)).sqrt();
            if tensor.is_none() && (far > tolerance.weights || far.is_nan()) {
                tensor = Some((named.name.clone(), far));
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
    /// Whether the layout trained the same model.
    pub fn within(&self, tolerance: &Tolerance) -> bool {
        self.loss <= tolerance.loss && self.weights <= tolerance.weights
    }
}

/// The larger number; what is none counts as largest.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) }
}
