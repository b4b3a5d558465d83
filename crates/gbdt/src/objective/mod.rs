//! Losses: derivatives, initial predictions and the transformation of margins. Elementwise, so nothing depends on ranks;
//! groups of a ranking are on one rank.

mod math;
pub(crate) mod rank;

pub use math::exp;

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;

use crate::collective::{all_succeed, exact_sum};
use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::par::{Disjoint, for_each, pieces};
use crate::params::{Objective, Params};
use crate::train::gradient::Pair;

/// Rows that a thread computes at a time.
const GRAIN: usize = 1 << 14;

/// Smallest hessian of a row.
const MIN_HESSIAN: f32 = 1e-16;

/// The hessian of Poisson regression is larger by this factor, exp(0.7), which limits the steps (XGBoost's
/// `max_delta_step`).
const POISSON_FACTOR: f32 = 2.013_752_7;

/// Fails if the labels do not fit the objective. Collective.
pub fn check_labels(group: &Group, matrix: &Matrix, params: &Params) -> Result<()> {
    all_succeed(group, check_local(matrix, params))?;
    if params.objective == Objective::Rank {
        let mut missing = [i64::from(matrix.rows > 0 && matrix.groups.is_empty())];
        group.all_reduce(&mut missing, Op::Max)?;
        if missing[0] > 0 {
            return Err(Error::Input("objective rank needs groups; set data.group".into()));
        }
    }
    Ok(())
}

fn check_local(matrix: &Matrix, params: &Params) -> Result<()> {
    if !matrix.is_labeled() {
        return Err(Error::Input("the data has no labels".into()));
    }
    let classes = params.classes as f32;
    let (ok, what): (&dyn Fn(f32) -> bool, String) = match params.objective {
        Objective::Logistic => (&|label| (0.0..=1.0).contains(&label), "from 0 to 1".into()),
        Objective::Softmax => (
            &move |label| label >= 0.0 && label < classes && label.fract() == 0.0,
            format!("an integer from 0 to {}", params.classes - 1),
        ),
        Objective::Poisson => (&|label| label >= 0.0, "0 or larger".into()),
        Objective::Rank => (
            &|label| (0.0..=31.0).contains(&label) && label.fract() == 0.0,
            "an integer from 0 to 31".into(),
        ),
        _ => return Ok(()),
    };
    match matrix.label.iter().position(|label| !ok(*label)) {
        None => Ok(()),
        Some(row) => Err(Error::Input(format!(
            "the label of row {} is {}; with this objective it must be {what}",
            matrix.first_row + row as u64 + 1,
            matrix.label[row]
        ))),
    }
}

/// The prediction before the first tree, in the space of the output. Collective.
pub fn base_score(group: &Group, matrix: &Matrix, params: &Params) -> Result<f32> {
    if let Some(score) = params.base_score {
        return Ok(score as f32);
    }
    let mean = || -> Result<f64> {
        let weight = |row: usize| f64::from(matrix.weight_of(row));
        let term = |row: usize| f64::from(matrix.label[row]) * weight(row);
        let rows = 0..matrix.rows;
        let above = exact_sum(group, &mut rows.clone().map(|row| term(row).max(0.0)))?;
        let below = exact_sum(group, &mut rows.clone().map(|row| (-term(row)).max(0.0)))?;
        let total = exact_sum(group, &mut rows.map(weight))?;
        Ok(if total > 0.0 { (above - below) / total } else { 0.5 })
    };
    let quantile = |quantile: f64| -> Result<f32> {
        let rows: Vec<u32> = (0..matrix.rows as u32).collect();
        let list = crate::train::leaf::residuals(matrix, &vec![0.0; matrix.rows], &rows);
        Ok(crate::train::leaf::weighted_quantiles(group, &[list], quantile)?[0])
    };
    Ok(match params.objective {
        Objective::SquaredError => mean()? as f32,
        // Labels of one class would give an infinite margin.
        Objective::Logistic => mean()?.clamp(1e-6, 1.0 - 1e-6) as f32,
        Objective::Poisson => mean()?.max(1e-6) as f32,
        Objective::AbsoluteError => quantile(0.5)?,
        Objective::Quantile => quantile(params.quantile)?,
        Objective::Softmax | Objective::Rank => 0.5,
    })
}

/// Derivatives of all rows and outputs: pair `output * rows + row`, like the margins.
pub fn gradients(team: &Team, matrix: &Matrix, params: &Params, margins: &[f32], out: &mut [Pair]) {
    let rows = matrix.rows;
    if params.objective == Objective::Rank {
        return rank::gradients(team, matrix, margins, out);
    }
    let parts = pieces(rows, GRAIN, usize::MAX);
    let outputs = params.outputs();
    let out = Disjoint::new(out);
    for_each(team, parts.len(), &|part| {
        let range = parts[part].clone();
        if params.objective == Objective::Softmax {
            return softmax(matrix, margins, range, outputs, &out);
        }
        // SAFETY: the parts are disjoint.
        let out = unsafe { out.range(range.clone()) };
        let (margins, labels) = (&margins[range.clone()], &matrix.label[range.clone()]);
        elementwise(params, margins, labels, out);
        if !matrix.weight.is_empty() {
            for (pair, weight) in out.iter_mut().zip(&matrix.weight[range]) {
                *pair = Pair { g: pair.g * weight, h: pair.h * weight };
            }
        }
    });
}

fn elementwise(params: &Params, margins: &[f32], labels: &[f32], out: &mut [Pair]) {
    let rows = margins.iter().zip(labels).zip(out);
    match params.objective {
        Objective::SquaredError => {
            rows.for_each(|((margin, label), out)| *out = Pair { g: margin - label, h: 1.0 })
        }
        Objective::Logistic => {
            let positive = params.scale_pos_weight as f32;
            rows.for_each(|((margin, label), out)| {
                let p = sigmoid(*margin);
                let weight = if *label == 1.0 { positive } else { 1.0 };
                let h = (p * (1.0 - p)).max(MIN_HESSIAN);
                *out = Pair { g: (p - label) * weight, h: h * weight };
            })
        }
        Objective::Poisson => rows.for_each(|((margin, label), out)| {
            let p = exp(*margin);
            *out = Pair { g: p - label, h: (p * POISSON_FACTOR).max(MIN_HESSIAN) };
        }),
        Objective::AbsoluteError => rows.for_each(|((margin, label), out)| {
            let residual = margin - label;
            let g = f32::from(residual > 0.0) - f32::from(residual < 0.0);
            *out = Pair { g, h: 1.0 };
        }),
        Objective::Quantile => {
            let quantile = params.quantile as f32;
            rows.for_each(|((margin, label), out)| {
                let g = if label >= margin { -quantile } else { 1.0 - quantile };
                *out = Pair { g, h: 1.0 };
            })
        }
        Objective::Softmax | Objective::Rank => unreachable!("not elementwise"),
    }
}

/// Rows whose probabilities of all classes stay in the cache.
const BLOCK: usize = 128;

/// As [`probabilities`] for each row, bit for bit. The inner loops are over rows, so that they vectorize.
fn softmax(
    matrix: &Matrix,
    margins: &[f32],
    range: std::ops::Range<usize>,
    outputs: usize,
    out: &Disjoint<'_, Pair>,
) {
    let rows = matrix.rows;
    let mut p = vec![[0.0f32; BLOCK]; outputs];
    for first in range.clone().step_by(BLOCK) {
        let block = first..range.end.min(first + BLOCK);
        let of_class = |k: usize| k * rows + block.start..k * rows + block.end;
        let (mut most, mut sum) = ([f32::NEG_INFINITY; BLOCK], [0.0f32; BLOCK]);
        for k in 0..outputs {
            let margins = &margins[of_class(k)];
            most.iter_mut().zip(margins).for_each(|(most, margin)| *most = most.max(*margin));
        }
        for (k, p) in p.iter_mut().enumerate() {
            let (margins, sums) = (&margins[of_class(k)], sum.iter_mut().zip(&most));
            for ((p, margin), (sum, most)) in p.iter_mut().zip(margins).zip(sums) {
                *p = exp(*margin - *most);
                *sum += *p;
            }
        }
        let (labels, weights) = (&matrix.label[block.clone()], matrix.weight.get(block.clone()));
        for (k, p) in p.iter().enumerate() {
            // SAFETY: the rows belong to this part.
            let out = unsafe { out.range(of_class(k)) };
            let class = k as f32;
            for (((out, p), sum), label) in out.iter_mut().zip(p).zip(&sum).zip(labels) {
                let p = p / sum;
                let g = p - f32::from(u8::from(*label == class));
                *out = Pair { g, h: (2.0 * p * (1.0 - p)).max(MIN_HESSIAN) };
            }
            if let Some(weights) = weights {
                for (pair, weight) in out.iter_mut().zip(weights) {
                    *pair = Pair { g: pair.g * weight, h: pair.h * weight };
                }
            }
        }
    }
}

pub fn sigmoid(margin: f32) -> f32 {
    1.0 / (1.0 + exp(-margin))
}

/// Margins of the classes of a row → probabilities.
pub fn probabilities(margins: &mut [f32]) {
    let most = margins.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for margin in margins.iter_mut() {
        *margin = exp(*margin - most);
        sum += *margin;
    }
    margins.iter_mut().for_each(|p| *p /= sum);
}

/// Margins of a row → predictions.
pub fn transform(objective: Objective, row: &mut [f32]) {
    match objective {
        Objective::Logistic => row.iter_mut().for_each(|margin| *margin = sigmoid(*margin)),
        Objective::Poisson => row.iter_mut().for_each(|margin| *margin = exp(*margin)),
        Objective::Softmax => probabilities(row),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use lockstep_comm::single_rank;

    use super::*;
    use crate::data::Table;

    /// Blocks of rows give the bits of one row after the other, with and without weights.
    #[test]
    fn softmax_gradients_are_those_of_single_rows() {
        let (rows, classes) = (2 * BLOCK + 45, 5);
        let x: Vec<f32> = (0..rows).map(|row| row as f32).collect();
        let labels: Vec<f32> = (0..rows).map(|row| (row * 7 % classes) as f32).collect();
        let margins: Vec<f32> =
            (0..rows * classes).map(|i| ((i * 2_654_435) % 1000) as f32 * 0.013 - 6.5).collect();
        let weights = (0..rows).map(|row| 0.5 + row as f32 * 0.01).collect();
        let (objective, team) = (Objective::Softmax, Team::new(2));
        let params = Params { objective, classes, ..Params::default() };
        for weight in [None, Some(weights)] {
            let table = Table::dense(vec!["x".into()], x.clone(), labels.clone());
            let table = Table { weight, ..table };
            let matrix = Matrix::new(&single_rank(), &table, None, 256, &team).unwrap();
            let mut pairs = vec![Pair { g: 0.0, h: 0.0 }; rows * classes];
            gradients(&team, &matrix, &params, &margins, &mut pairs);
            for row in 0..rows {
                let mut p: Vec<f32> = (0..classes).map(|k| margins[k * rows + row]).collect();
                probabilities(&mut p);
                for (k, p) in p.iter().enumerate() {
                    let (weight, pair) = (matrix.weight_of(row), &pairs[k * rows + row]);
                    let g = (p - f32::from(u8::from(labels[row] == k as f32))) * weight;
                    let h = (2.0 * p * (1.0 - p)).max(MIN_HESSIAN) * weight;
                    assert_eq!((pair.g.to_bits(), pair.h.to_bits()), (g.to_bits(), h.to_bits()));
                }
            }
        }
    }
}
