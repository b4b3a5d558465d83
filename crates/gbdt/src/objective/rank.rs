//! LambdaMART (Burges 2010): pairs of rows of a group, weighted by the change of NDCG when they swap places.

use lockstep_kernels::Team;

use crate::matrix::Matrix;
use crate::objective::exp;
use crate::par::{Disjoint, for_each};
use crate::train::gradient::Pair;

pub(crate) fn gradients(team: &Team, matrix: &Matrix, margins: &[f32], out: &mut [Pair]) {
    let groups = matrix.groups.len().saturating_sub(1);
    let out = Disjoint::new(out);
    for_each(team, groups, &|group| {
        let range = matrix.groups[group] as usize..matrix.groups[group + 1] as usize;
        // SAFETY: groups are disjoint rows.
        let pairs = unsafe { out.range(range.clone()) };
        let (margins, labels) = (&margins[range.clone()], &matrix.label[range.clone()]);
        of_group(margins, labels, pairs);
        // The weight of a group is that of its first row.
        let weight = matrix.weight_of(range.start);
        pairs.iter_mut().for_each(|pair| *pair = Pair { g: pair.g * weight, h: pair.h * weight });
    });
}

fn of_group(margins: &[f32], labels: &[f32], out: &mut [Pair]) {
    out.fill(Pair::default());
    let order = by_score(margins);
    let ideal = ideal_dcg(labels, usize::MAX);
    if ideal == 0.0 {
        return;
    }
    let mut sums = vec![(0.0f64, 0.0f64); out.len()];
    for (i, one) in order.iter().enumerate() {
        for (j, other) in order.iter().enumerate().skip(i + 1) {
            if labels[*one] == labels[*other] {
                continue;
            }
            let change = (gain(labels[*one]) - gain(labels[*other])).abs()
                * (discount(i) - discount(j)).abs()
                / ideal;
            let (high, low) =
                if labels[*one] > labels[*other] { (*one, *other) } else { (*other, *one) };
            let p = f64::from(1.0 / (1.0 + exp(margins[high] - margins[low])));
            let (lambda, hessian) = (p * change, (p * (1.0 - p)).max(1e-16) * change);
            sums[high].0 -= lambda;
            sums[low].0 += lambda;
            sums[high].1 += 2.0 * hessian;
            sums[low].1 += 2.0 * hessian;
        }
    }
    for (out, (g, h)) in out.iter_mut().zip(sums) {
        *out = Pair { g: g as f32, h: h as f32 };
    }
}

/// Rows by decreasing score; equal scores in row order.
pub fn by_score(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|one, other| scores[*other].total_cmp(&scores[*one]).then(one.cmp(other)));
    order
}

pub fn gain(label: f32) -> f64 {
    f64::from(label).exp2() - 1.0
}

pub fn discount(place: usize) -> f64 {
    1.0 / (place as f64 + 2.0).log2()
}

/// The largest DCG of the first `most` places.
pub fn ideal_dcg(labels: &[f32], most: usize) -> f64 {
    let mut sorted = labels.to_vec();
    sorted.sort_by(|one, other| other.total_cmp(one));
    sorted.iter().take(most).enumerate().map(|(place, label)| gain(*label) * discount(place)).sum()
}
