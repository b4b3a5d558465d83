//! Values of the leaves of a tree, from sums with 62 bits, and the update of the margins.

use lockstep_comm::{Group, Op};
use lockstep_kernels::Team;

use crate::error::Result;
use crate::matrix::Matrix;
use crate::matrix::select::{Sorted, Target, select, value_of};
use crate::par::{Disjoint, for_each, map, pieces};
use crate::params::{Objective, Params};
use crate::train::gradient::{Pair, Scales};
use crate::train::grow::Grown;
use crate::train::partition::Partition;
use crate::train::split::Scorer;

/// Rows that a thread sums or updates at a time.
const GRAIN: usize = 1 << 14;

/// Rows of one output: derivatives, their scales and the margins.
pub struct Output<'a> {
    pub matrix: &'a Matrix,
    pub pairs: &'a [Pair],
    pub scales: Scales,
    pub margins: &'a mut [f32],
}

/// Sets the values, covers and weights of all nodes and adds the leaf values to the margins. Collective: one all-reduce
/// of 16 bytes per leaf; for medians and other quantiles, see `select.rs`.
pub fn finish(
    group: &Group,
    team: &Team,
    params: &Params,
    (grown, partition): (&mut Grown, &mut Partition),
    output: &mut Output<'_>,
) -> Result<()> {
    let scales = output.scales;
    // The leaf of each row: after this, rows are visited in their order in memory.
    let (rows, leaf_of) = (&partition.rows[..], Disjoint::new(&mut partition.scratch));
    for_each(team, grown.leaves.len(), &|leaf| {
        for row in &rows[grown.leaves[leaf].rows.clone()] {
            // SAFETY: a row is in one leaf.
            *unsafe { leaf_of.element(*row as usize) } = leaf as u32;
        }
    });
    let leaf_of = &partition.scratch[..];
    let parts = pieces(leaf_of.len(), GRAIN, 4 * team.size());
    let partial = map(team, parts.len(), &|part| {
        let mut sums = vec![0i64; 2 * grown.leaves.len()];
        for (leaf, pair) in
            leaf_of[parts[part].clone()].iter().zip(&output.pairs[parts[part].clone()])
        {
            let sums = &mut sums[2 * *leaf as usize..][..2];
            sums[0] += (f64::from(pair.g) * scales.fine_g) as i64;
            sums[1] += (f64::from(pair.h) * scales.fine_h) as i64;
        }
        sums
    });
    let mut sums = vec![0i64; 2 * grown.leaves.len()];
    for part in partial {
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    group.all_reduce(&mut sums, Op::Sum)?;
    let values = match params.objective {
        Objective::AbsoluteError => Some(quantiles(group, team, (grown, rows), output, 0.5)?),
        Objective::Quantile => {
            Some(quantiles(group, team, (grown, rows), output, params.quantile)?)
        }
        _ => None,
    };
    set_nodes(params, grown, &sums, values.as_deref(), &scales);
    let values: Vec<f32> =
        grown.leaves.iter().map(|leaf| grown.tree.threshold[leaf.node]).collect();
    let margins = Disjoint::new(output.margins);
    for_each(team, parts.len(), &|part| {
        // SAFETY: the parts are disjoint.
        let margins = unsafe { margins.range(parts[part].clone()) };
        for (margin, leaf) in margins.iter_mut().zip(&leaf_of[parts[part].clone()]) {
            *margin += values[*leaf as usize];
        }
    });
    Ok(())
}

/// Sets values, covers and weights. `sums` are those of the leaves; a node has the sum of its children.
fn set_nodes(
    params: &Params,
    grown: &mut Grown,
    sums: &[i64],
    values: Option<&[f32]>,
    scales: &Scales,
) {
    let scorer = Scorer::new(params, scales);
    let mut totals = vec![(0i64, 0i64); grown.tree.nodes()];
    for (index, leaf) in grown.leaves.iter().enumerate() {
        totals[leaf.node] = (sums[2 * index], sums[2 * index + 1]);
    }
    // Children have higher numbers than their parent.
    for node in (1..totals.len()).rev() {
        let (parent, (g, h)) = (grown.tree.parent[node] as usize, totals[node]);
        totals[parent].0 += g;
        totals[parent].1 += h;
    }
    for (node, (g, h)) in totals.into_iter().enumerate() {
        let (g, h) = (g as f64 / scales.fine_g, h as f64 / scales.fine_h);
        let weight = scorer.weight(g, h, grown.bounds[node]);
        grown.tree.weight[node] = weight as f32;
        grown.tree.cover[node] = h as f32;
        if grown.tree.is_leaf(node) {
            grown.tree.threshold[node] = (params.eta * weight) as f32;
        }
    }
    for (leaf, value) in grown.leaves.iter().zip(values.unwrap_or(&[])) {
        grown.tree.weight[leaf.node] = *value;
        grown.tree.threshold[leaf.node] = (params.eta * f64::from(*value)) as f32;
    }
}

/// The quantile of the residuals in each leaf, weighted by the integer weights of rows.
fn quantiles(
    group: &Group,
    team: &Team,
    (grown, rows): (&Grown, &[u32]),
    output: &Output<'_>,
    quantile: f64,
) -> Result<Vec<f32>> {
    let (matrix, margins) = (output.matrix, &output.margins[..]);
    let lists = map(team, grown.leaves.len(), &|leaf| {
        residuals(matrix, margins, &rows[grown.leaves[leaf].rows.clone()])
    });
    weighted_quantiles(group, &lists, quantile)
}

/// The residuals of some rows, with their weights.
pub fn residuals(matrix: &Matrix, margins: &[f32], rows: &[u32]) -> Sorted {
    let residual = |row: &u32| matrix.label[*row as usize] - margins[*row as usize];
    match matrix.weight.is_empty() {
        true => Sorted::of(&rows.iter().map(residual).collect::<Vec<f32>>()),
        // Weights relative to 2⁻¹⁶, so that they are the same on every rank.
        false => Sorted::weighted(rows.iter().map(|row| {
            let weight = f64::from(matrix.weight[*row as usize]) * 65536.0;
            (residual(row), weight.round().min(f64::from(u32::MAX)) as u32)
        })),
    }
}

/// The quantile of each list over all ranks; 0 for lists without weight. Collective.
pub fn weighted_quantiles(group: &Group, lists: &[Sorted], quantile: f64) -> Result<Vec<f32>> {
    let mut totals: Vec<i64> = lists.iter().map(|list| list.total() as i64).collect();
    group.all_reduce(&mut totals, Op::Sum)?;
    let weight = |total: i64| ((total as f64 * quantile).ceil() as u64).clamp(1, total as u64);
    let targets: Vec<Target> = (0..lists.len())
        .filter(|list| totals[*list] > 0)
        .map(|list| Target { list, weight: weight(totals[list]) })
        .collect();
    let mut values = vec![0.0; lists.len()];
    for (target, key) in targets.iter().zip(select(group, lists, &targets)?) {
        values[target.list] = value_of(key);
    }
    Ok(values)
}
