//! Exact Shapley values of tree ensembles (Lundberg et al. 2018, algorithm 2): the contribution of each feature to the
//! margin of a row, in O(leaves × depth²).

use crate::model::Tree;

/// Trees and the expected value of each node.
pub(crate) struct TreeShap<'a> {
    trees: Vec<(&'a Tree, usize, f64)>,
}

/// One feature on the path from the root.
#[derive(Clone, Copy, Default)]
struct Step {
    /// Feature; `usize::MAX` for the root.
    feature: usize,
    /// Fraction of paths that flow through if the feature is unknown, and if it is known.
    zero: f64,
    one: f64,
    /// Weight of subsets of this size.
    weight: f64,
}

/// A row that descends a tree.
struct Walk<'a> {
    tree: &'a Tree,
    row: &'a [f32],
    out: &'a mut [f64],
}

impl<'a> TreeShap<'a> {
    pub fn new(trees: impl Iterator<Item = (&'a Tree, usize)>) -> TreeShap<'a> {
        TreeShap { trees: trees.map(|(tree, output)| (tree, output, mean(tree, 0))).collect() }
    }

    /// Contributions of the features to the margin of one output; the last number is the expected margin.
    pub fn contributions(&self, output: usize, row: &[f32], base: f64, out: &mut [f32]) {
        let mut sums = vec![0.0; out.len()];
        let last = out.len() - 1;
        sums[last] = base;
        for (tree, _, mean) in self.trees.iter().filter(|(_, of, _)| *of == output) {
            sums[last] += mean;
            let mut walk = Walk { tree, row, out: &mut sums };
            walk.descend(0, &[], Step { feature: usize::MAX, zero: 1.0, one: 1.0, weight: 0.0 });
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum as f32);
    }
}

/// Mean value of the leaves below a node, weighted by cover.
fn mean(tree: &Tree, node: usize) -> f64 {
    if tree.is_leaf(node) {
        return f64::from(tree.threshold[node]);
    }
    let (left, right) = (tree.left[node] as usize, tree.right[node] as usize);
    let share = share_of(tree, node, left);
    share * mean(tree, left) + (1.0 - share) * mean(tree, right)
}

/// Fraction of the cover of a node that a child has.
fn share_of(tree: &Tree, node: usize, child: usize) -> f64 {
    let (left, right) = (tree.left[node] as usize, tree.right[node] as usize);
    let total = f64::from(tree.cover[left]) + f64::from(tree.cover[right]);
    if total > 0.0 { f64::from(tree.cover[child]) / total } else { 0.5 }
}

impl Walk<'_> {
    fn descend(&mut self, node: usize, path: &[Step], step: Step) {
        let mut path = extend(path, step);
        let tree = self.tree;
        if tree.is_leaf(node) {
            for index in 1..path.len() {
                let weight = unwound_sum(&path, index);
                let Step { feature, zero, one, .. } = path[index];
                self.out[feature] += weight * (one - zero) * f64::from(tree.threshold[node]);
            }
            return;
        }
        let feature = tree.feature[node] as usize;
        let hot = tree.child(node, self.row[feature]);
        let (left, right) = (tree.left[node] as usize, tree.right[node] as usize);
        let cold = if hot == left { right } else { left };
        let (mut zero, mut one) = (1.0, 1.0);
        if let Some(index) = (1..path.len()).find(|index| path[*index].feature == feature) {
            (zero, one) = (path[index].zero, path[index].one);
            path = unwind(&path, index);
        }
        let next = |child: usize, one: f64| Step {
            feature,
            zero: zero * share_of(tree, node, child),
            one,
            weight: 0.0,
        };
        self.descend(hot, &path, next(hot, one));
        self.descend(cold, &path, next(cold, 0.0));
    }
}

/// The path with one more step.
fn extend(path: &[Step], step: Step) -> Vec<Step> {
    let depth = path.len();
    let mut path = path.to_vec();
    path.push(Step { weight: if depth == 0 { 1.0 } else { 0.0 }, ..step });
    let size = depth as f64 + 1.0;
    for i in (0..depth).rev() {
        path[i + 1].weight += step.one * path[i].weight * (i as f64 + 1.0) / size;
        path[i].weight *= step.zero * (depth - i) as f64 / size;
    }
    path
}

/// The path without one step.
fn unwind(path: &[Step], index: usize) -> Vec<Step> {
    let depth = path.len() - 1;
    let Step { zero, one, .. } = path[index];
    let size = depth as f64 + 1.0;
    let mut path = path.to_vec();
    let mut next = path[depth].weight;
    for i in (0..depth).rev() {
        if one != 0.0 {
            let weight = path[i].weight;
            path[i].weight = next * size / ((i as f64 + 1.0) * one);
            next = weight - path[i].weight * zero * (depth - i) as f64 / size;
        } else {
            path[i].weight = path[i].weight * size / (zero * (depth - i) as f64);
        }
    }
    for i in index..depth {
        let Step { feature, zero, one, .. } = path[i + 1];
        path[i] = Step { feature, zero, one, ..path[i] };
    }
    path.pop();
    path
}

/// Sum of the weights of the path without one step.
fn unwound_sum(path: &[Step], index: usize) -> f64 {
    let depth = path.len() - 1;
    let Step { zero, one, .. } = path[index];
    let size = depth as f64 + 1.0;
    let (mut next, mut total) = (path[depth].weight, 0.0);
    for i in (0..depth).rev() {
        if one != 0.0 {
            let weight = next * size / ((i as f64 + 1.0) * one);
            total += weight;
            next = path[i].weight - weight * zero * (depth - i) as f64 / size;
        } else if zero != 0.0 {
            total += path[i].weight * size / (zero * (depth - i) as f64);
        }
    }
    total
}
