//! Metrics of predictions. Sums are exact in the sense of `collective::exact_sum`, so early stopping does not depend on
//! the number of ranks.

use lockstep_comm::Group;

use crate::collective::{exact_sum, gather_bytes};
use crate::error::{Error, Result};
use crate::matrix::Matrix;
use crate::objective::rank::{by_score, discount, gain, ideal_dcg};
use crate::objective::transform;
use crate::params::Objective;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Metric {
    Rmse,
    Mae,
    Logloss,
    Auc,
    /// Fraction of wrong classes of a binary classification.
    Error,
    Merror,
    Mlogloss,
    PoissonNloglik,
    /// NDCG of the first places of each group; `usize::MAX` for all places.
    Ndcg(usize),
}

impl Metric {
    /// Parses a name; `ndcg@5` counts five places.
    pub fn parse(name: &str) -> std::result::Result<Metric, String> {
        Ok(match name {
            "rmse" => Metric::Rmse,
            "mae" => Metric::Mae,
            "logloss" => Metric::Logloss,
            "auc" => Metric::Auc,
            "error" => Metric::Error,
            "merror" => Metric::Merror,
            "mlogloss" => Metric::Mlogloss,
            "poisson-nloglik" => Metric::PoissonNloglik,
            "ndcg" => Metric::Ndcg(usize::MAX),
            _ => match name.strip_prefix("ndcg@").map(str::parse::<usize>) {
                Some(Ok(places)) if places > 0 => Metric::Ndcg(places),
                _ => {
                    return Err(format!(
                        "unknown metric {name}; use rmse, mae, logloss, auc, error, merror, mlogloss, \
                         poisson-nloglik, ndcg or ndcg@N"
                    ));
                }
            },
        })
    }

    /// Whether larger values are better.
    pub fn is_maximized(self) -> bool {
        matches!(self, Metric::Auc | Metric::Ndcg(_))
    }

    /// The metric of margins (`output * rows + row`). Collective.
    pub fn compute(
        self,
        group: &Group,
        matrix: &Matrix,
        objective: Objective,
        margins: &[f32],
    ) -> Result<f64> {
        if !matrix.is_labeled() {
            return Err(Error::Input("a metric needs labels".into()));
        }
        match self {
            Metric::Auc => return auc(group, matrix, margins),
            Metric::Ndcg(places) => return ndcg(group, matrix, margins, places),
            _ => {}
        }
        let (rows, outputs) = (matrix.rows, margins.len() / matrix.rows.max(1));
        let mut row_margins = vec![0.0; outputs.max(1)];
        let mut term = |row: usize| {
            (0..outputs).for_each(|k| row_margins[k] = margins[k * rows + row]);
            transform(objective, &mut row_margins);
            let loss = self.loss(&row_margins, f64::from(matrix.label[row]));
            loss * f64::from(matrix.weight_of(row))
        };
        let terms: Vec<f64> = (0..rows).map(&mut term).collect();
        // Only the likelihood of Poisson can be negative.
        let above = exact_sum(group, &mut terms.iter().map(|term| term.max(0.0)))?;
        let below = match self {
            Metric::PoissonNloglik => exact_sum(group, &mut terms.iter().map(|t| (-t).max(0.0)))?,
            _ => 0.0,
        };
        let weights = exact_sum(group, &mut (0..rows).map(|row| f64::from(matrix.weight_of(row))))?;
        let mean = (above - below) / weights;
        Ok(if self == Metric::Rmse { mean.sqrt() } else { mean })
    }

    /// Loss of one row, from its predictions.
    fn loss(self, predictions: &[f32], label: f64) -> f64 {
        let p = f64::from(predictions[0]);
        let of_class = || f64::from(predictions.get(label as usize).copied().unwrap_or(0.0));
        match self {
            Metric::Rmse => (p - label) * (p - label),
            Metric::Mae => (p - label).abs(),
            Metric::Logloss => {
                let p = p.clamp(1e-16, 1.0 - 1e-16);
                let zero = if label < 1.0 { (1.0 - label) * (1.0 - p).ln() } else { 0.0 };
                let one = if label > 0.0 { label * p.ln() } else { 0.0 };
                -(zero + one)
            }
            Metric::Error => f64::from(u8::from((p > 0.5) != (label > 0.5))),
            Metric::Merror => {
                let best = (0..predictions.len())
                    .reduce(|best, k| if predictions[k] > predictions[best] { k } else { best });
                f64::from(u8::from(best != Some(label as usize)))
            }
            Metric::Mlogloss => -of_class().max(1e-16).ln(),
            Metric::PoissonNloglik => {
                let p = p.max(1e-16);
                ln_factorial(label) + p - label * p.ln()
            }
            Metric::Auc | Metric::Ndcg(_) => unreachable!("not a mean over rows"),
        }
    }
}

/// ln Γ(x + 1) by Lanczos' approximation.
fn ln_factorial(x: f64) -> f64 {
    const C: [f64; 6] = [
        76.180_091_729_471_46,
        -86.505_320_329_416_77,
        24.014_098_240_830_91,
        -1.231_739_572_450_155,
        0.120_865_097_386_617_9e-2,
        -0.539_523_938_495_3e-5,
    ];
    let z = x + 1.0;
    let t = z + 5.5;
    let series = C
        .iter()
        .enumerate()
        .fold(1.000_000_000_190_015, |sum, (i, c)| sum + c / (z + 1.0 + i as f64));
    (z + 0.5) * t.ln() - t + (2.506_628_274_631_000_5 * series / z).ln()
}

/// Area under the ROC curve over the rows of all ranks, which every rank gathers (12 bytes per row). NaN if all labels
/// are of one class.
fn auc(group: &Group, matrix: &Matrix, margins: &[f32]) -> Result<f64> {
    let mut bytes = Vec::with_capacity(12 * matrix.rows);
    for (row, (margin, label)) in margins.iter().zip(matrix.label.iter()).enumerate() {
        let values = [*margin, *label, matrix.weight_of(row)];
        values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
    }
    let mut rows: Vec<(f32, f32, f32)> = Vec::new();
    for bytes in gather_bytes(group, &bytes)? {
        rows.extend(bytes.chunks_exact(12).map(|row| {
            let value =
                |at: usize| f32::from_le_bytes(row[at..at + 4].try_into().expect("four bytes"));
            (value(0), value(4), value(8))
        }));
    }
    // All ranks sort the same rows, so the sums are the same.
    rows.sort_by(|one, other| {
        one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1)).then(one.2.total_cmp(&other.2))
    });
    let (mut area, mut negatives, mut positives, mut at) = (0.0, 0.0, 0.0, 0);
    while at < rows.len() {
        let (mut below, mut above, score) = (0.0, 0.0, rows[at].0);
        while at < rows.len() && rows[at].0 == score {
            let (_, label, weight) = rows[at];
            above += f64::from(label) * f64::from(weight);
            below += (1.0 - f64::from(label)) * f64::from(weight);
            at += 1;
        }
        area += above * (negatives + below / 2.0);
        negatives += below;
        positives += above;
    }
    Ok(area / (negatives * positives))
}

/// Mean NDCG of groups. A group without relevant rows counts as 1.
fn ndcg(group: &Group, matrix: &Matrix, margins: &[f32], places: usize) -> Result<f64> {
    let groups = matrix.groups.len().saturating_sub(1);
    let of = |index: usize| {
        let range = matrix.groups[index] as usize..matrix.groups[index + 1] as usize;
        let (scores, labels) = (&margins[range.clone()], &matrix.label[range]);
        let ideal = ideal_dcg(labels, places);
        if ideal == 0.0 {
            return 1.0;
        }
        let order = by_score(scores);
        let dcg: f64 = order
            .iter()
            .take(places)
            .enumerate()
            .map(|(place, row)| gain(labels[*row]) * discount(place))
            .sum();
        dcg / ideal
    };
    let sum = exact_sum(group, &mut (0..groups).map(of))?;
    let count = exact_sum(group, &mut (0..groups).map(|_| 1.0))?;
    Ok(sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Metric::parse("ndcg@5"), Ok(Metric::Ndcg(5)));
        assert!(
            Metric::parse("ndcg@x").is_err()
                && Metric::parse("f1").unwrap_err().contains("use rmse")
        );
    }

    #[test]
    fn factorials() {
        for (x, factorial) in [(0.0, 1.0f64), (1.0, 1.0), (5.0, 120.0), (10.0, 3_628_800.0)] {
            assert!((ln_factorial(x) - factorial.ln()).abs() < 1e-8, "{x}");
        }
    }
}
