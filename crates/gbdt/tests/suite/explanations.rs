//! TreeSHAP against the definition of Shapley values.

use lockstep_gbdt::{Model, Params, PredictionKind, Team, Tree, importance};

use crate::support::{Data, mixed, train};

/// Expected value of a tree if only the features of `known` are known.
fn expectation(tree: &Tree, node: usize, row: &[f32], known: u32) -> f64 {
    if tree.is_leaf(node) {
        return f64::from(tree.threshold[node]);
    }
    let feature = tree.feature[node] as usize;
    if known >> feature & 1 == 1 {
        return expectation(tree, tree.child(node, row[feature]), row, known);
    }
    let (left, right) = (tree.left[node] as usize, tree.right[node] as usize);
    let (a, b) = (f64::from(tree.cover[left]), f64::from(tree.cover[right]));
    (a * expectation(tree, left, row, known) + b * expectation(tree, right, row, known)) / (a + b)
}

fn shapley(model: &Model, row: &[f32]) -> Vec<f64> {
    let n = model.features.len();
    let factorial = |k: usize| (1..=k).map(|k| k as f64).product::<f64>();
    let value =
        |known: u32| model.trees.iter().map(|tree| expectation(tree, 0, row, known)).sum::<f64>();
    let mut out: Vec<f64> = (0..n)
        .map(|feature| {
            (0..1u32 << n)
                .filter(|known| known >> feature & 1 == 0)
                .map(|known| {
                    let size = known.count_ones() as usize;
                    let weight = factorial(size) * factorial(n - size - 1) / factorial(n);
                    weight * (value(known | 1 << feature) - value(known))
                })
                .sum()
        })
        .collect();
    out.push(value(0) + f64::from(model.base_margin(0)));
    out
}

#[test]
fn contributions_are_shapley_values() {
    let data = mixed(600);
    let model = train(&data, &Params { rounds: 3, max_depth: 4, ..Params::default() }, 1, 1);
    let table = data.part(0..20);
    let team = Team::new(2);
    let found = model.predict(&table, PredictionKind::Contributions, &team).unwrap();
    let margins = model.predict(&table, PredictionKind::Margins, &team).unwrap();
    for row in 0..20 {
        let found = &found[row * (data.columns + 1)..][..data.columns + 1];
        for (found, expected) in found.iter().zip(shapley(&model, data.row(row))) {
            assert!((f64::from(*found) - expected).abs() < 1e-5, "row {row}: {found} {expected}");
        }
        let sum: f32 = found.iter().sum();
        assert!((sum - margins[row]).abs() < 1e-4);
    }
}

#[test]
fn contributions_of_classes_add_up_to_their_margins() {
    let mut data = mixed(500);
    data.label.iter_mut().for_each(|label| *label = label.clamp(0.0, 2.0).floor());
    let params = Params {
        objective: lockstep_gbdt::Objective::Softmax,
        classes: 3,
        rounds: 3,
        ..Params::default()
    };
    let model = train(&data, &params, 1, 1);
    let (table, team) = (data.part(0..10), Team::new(1));
    let found = model.predict(&table, PredictionKind::Contributions, &team).unwrap();
    let margins = model.predict(&table, PredictionKind::Margins, &team).unwrap();
    for (found, margin) in found.chunks_exact(data.columns + 1).zip(&margins) {
        assert!((found.iter().sum::<f32>() - margin).abs() < 1e-4);
    }
}

#[test]
fn importance_counts_splits() {
    let data = mixed(1000);
    let model = train(&data, &Params { rounds: 5, ..Params::default() }, 1, 1);
    let all = importance(&model);
    let splits: usize = all.iter().map(|feature| feature.count).sum();
    let expected: usize = model.trees.iter().map(|tree| tree.leaves() - 1).sum();
    assert_eq!(splits, expected);
    assert!(all.windows(2).all(|pair| pair[0].gain >= pair[1].gain));
    let useless = |name: &str| all.iter().all(|feature| feature.feature != name);
    assert!(useless("f5") && useless("f6"), "constant and missing columns are never used");
}

#[test]
fn leaves_are_node_numbers() {
    let data: Data = mixed(300);
    let model = train(&data, &Params { rounds: 2, ..Params::default() }, 1, 1);
    let leaves = model.predict(&data.part(0..300), PredictionKind::Leaves, &Team::new(1)).unwrap();
    for pair in leaves.chunks_exact(2) {
        for (tree, leaf) in model.trees.iter().zip(pair) {
            assert!(tree.is_leaf(*leaf as usize));
        }
    }
}
