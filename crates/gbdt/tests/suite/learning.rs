//! Models learn what they should.

use lockstep_comm::single_rank;
use lockstep_gbdt::{
    Booster, EvalSet, Evaluation, Generate, Growth, Matrix, Metric, Model, Objective, Params,
    PredictionKind, Progress, Table, Team, fit,
};
use std::ops::ControlFlow;

use crate::support::{Data, binary, mixed, train, uniform};

fn metric(name: &str, data: &Data, model: &Model) -> f64 {
    let (world, team) = (single_rank(), Team::new(1));
    let table = data.part(0..data.rows());
    let by_row = model.predict(&table, PredictionKind::Margins, &team).unwrap();
    let (rows, outputs) = (data.rows(), model.outputs);
    let mut margins = vec![0.0; by_row.len()];
    (0..rows * outputs).for_each(|i| margins[i % outputs * rows + i / outputs] = by_row[i]);
    let mut labels = Table::dense(vec![], vec![], table.label);
    labels.group = table.group;
    let matrix = Matrix::new(&world, &labels, None, 2, &team).unwrap();
    Metric::parse(name).unwrap().compute(&world, &matrix, model.objective, &margins).unwrap()
}

#[test]
fn every_objective_improves_its_metric() {
    let data = mixed(2000);
    let classes = {
        let mut data = data.clone();
        data.label.iter_mut().for_each(|label| *label = (*label * 1.3).clamp(0.0, 4.0).floor());
        data
    };
    let counts = {
        let mut data = data.clone();
        data.label.iter_mut().for_each(|label| *label = label.max(0.0).round());
        data
    };
    let ranking = {
        let mut data = classes.clone();
        data.group = Some((0..data.rows()).map(|row| row as u64 / 20).collect());
        data
    };
    let cases = [
        (Objective::SquaredError, "rmse", &data, 0.3),
        (Objective::AbsoluteError, "mae", &data, 0.4),
        (Objective::Quantile, "mae", &data, 0.4),
        (Objective::Logistic, "logloss", &binary(data.clone()), 0.4),
        (Objective::Logistic, "error", &binary(data.clone()), 0.2),
        (Objective::Softmax, "mlogloss", &classes, 0.6),
        (Objective::Softmax, "merror", &classes, 0.6),
        (Objective::Poisson, "poisson-nloglik", &counts, 0.9),
    ];
    for (objective, name, data, factor) in cases {
        let classes = if objective == Objective::Softmax { 5 } else { 0 };
        let params = Params { objective, classes, rounds: 40, ..Params::default() };
        let trained = metric(name, data, &train(data, &params, 2, 1));
        let start = metric(name, data, &train(data, &Params { rounds: 0, ..params }, 1, 1));
        assert!(trained < factor * start, "{objective:?} {name}: {trained} after {start}");
    }
    for (objective, name, data) in
        [(Objective::Logistic, "auc", &binary(data)), (Objective::Rank, "ndcg@5", &ranking)]
    {
        let params = Params { objective, rounds: 40, ..Params::default() };
        let value = metric(name, data, &train(data, &params, 2, 1));
        assert!(value > 0.95, "{objective:?} {name}: {value}");
    }
}

#[test]
fn generated_data_reaches_its_entropy() {
    let generate = Generate { rows: 20_000, eval_rows: 5_000, ..Generate::default() };
    let (world, team) = (single_rank(), Team::new(2));
    let params = Params {
        objective: Objective::Logistic,
        rounds: 60,
        eta: 0.2,
        max_depth: 4,
        ..Params::default()
    };
    let matrix = Matrix::new(&world, &generate.table(0..20_000), None, 256, &team).unwrap();
    let valid = generate.table(20_000..25_000);
    let valid = Matrix::new(&world, &valid, Some(&matrix.cuts), 256, &team).unwrap();
    let mut booster = Booster::new(&world, &team, &matrix, &params).unwrap();
    let mut sets = [EvalSet::new("valid", valid)];
    let mut evaluation = Evaluation { sets: &mut sets, train: true, every: 60 };
    let progress = fit(
        &world,
        &team,
        &mut booster,
        (&params, &mut evaluation),
        (Progress::default(), &mut |_, _| Ok(ControlFlow::Continue(()))),
    )
    .unwrap();
    let rows = 20_000..25_000;
    let (entropy, best) = (generate.entropy(rows.clone()), generate.true_logloss(rows));
    let loss = progress.metrics[1].1;
    assert_eq!(progress.metrics[1].0, "valid-logloss");
    assert!((best / entropy - 1.0).abs() < 0.03, "{best} with entropy {entropy}");
    assert!(loss < 1.06 * best && loss > 0.998 * best, "{loss}, true probabilities {best}");
}

#[test]
fn the_first_split_is_the_best_one() {
    // Brute force over all splits of one feature.
    let rows = 400;
    let x: Vec<f32> = (0..rows).map(|row| (uniform(1, row) * 50.0).floor()).collect();
    let label: Vec<f32> =
        (0..rows).map(|row| f32::from(u8::from(x[row] > 31.0)) + uniform(2, row)).collect();
    let data = Data {
        columns: 1,
        values: x.clone(),
        label: label.clone(),
        weight: None,
        group: None,
        categorical: vec![],
    };
    let params =
        Params { rounds: 1, max_depth: 1, base_score: Some(0.0), eta: 1.0, ..Params::default() };
    let model = train(&data, &params, 3, 1);
    let score = |rows: &mut dyn Iterator<Item = usize>| {
        let (g, h) = rows.fold((0.0, 0.0), |(g, h), row| (g - f64::from(label[row]), h + 1.0));
        (g * g / (h + 1.0), -g / (h + 1.0))
    };
    let all = score(&mut (0..rows)).0;
    let (mut best, mut split) = (0.0, 0.0);
    for threshold in 1..50 {
        let threshold = threshold as f32;
        let gain = score(&mut (0..rows).filter(|row| x[*row] < threshold)).0
            + score(&mut (0..rows).filter(|row| x[*row] >= threshold)).0
            - all;
        if gain > best {
            (best, split) = (gain, threshold);
        }
    }
    let tree = &model.trees[0];
    assert_eq!(tree.threshold[0], split);
    assert!((f64::from(tree.gain[0]) - best).abs() < 1e-3 * best, "{} {best}", tree.gain[0]);
    let left = score(&mut (0..rows).filter(|row| x[*row] < split)).1;
    assert!((f64::from(tree.threshold[1]) - left).abs() < 1e-5);
}

#[test]
fn monotone_constraints_hold() {
    let rows = 2000;
    let x: Vec<f32> = (0..rows).map(|row| uniform(1, row)).collect();
    let label: Vec<f32> =
        (0..rows).map(|row| x[row] + (20.0 * x[row]).sin() * 0.3 + 0.1 * uniform(2, row)).collect();
    let data =
        Data { columns: 1, values: x, label, weight: None, group: None, categorical: vec![] };
    let params = Params { monotone: [("f0".to_string(), 1)].into(), ..Params::default() };
    let constrained = train(&data, &params, 2, 1);
    let free = train(&data, &Params::default(), 2, 1);
    let falls = |model: &Model| {
        let line: Vec<f32> =
            (0..1000).map(|i| model.predict_row(&[i as f32 / 1000.0])[0]).collect();
        line.windows(2).filter(|pair| pair[1] < pair[0] - 1e-6).count()
    };
    assert_eq!(falls(&constrained), 0);
    assert!(falls(&free) > 0);
}

#[test]
fn growth_respects_its_limits() {
    let data = mixed(2000);
    for (grow, max_depth, max_leaves) in
        [(Growth::Depth, 3, 0), (Growth::Depth, 5, 11), (Growth::Loss, 0, 9), (Growth::Loss, 4, 0)]
    {
        let params = Params { grow, max_depth, max_leaves, rounds: 3, ..Params::default() };
        for tree in &train(&data, &params, 2, 1).trees {
            let depth = |mut node: usize| {
                let mut depth = 0;
                while node != 0 {
                    node = tree.parent[node] as usize;
                    depth += 1;
                }
                depth
            };
            let deepest = (0..tree.nodes()).map(depth).max().unwrap();
            assert!(max_depth == 0 || deepest <= max_depth, "{grow:?}: {deepest}");
            assert!(max_leaves == 0 || tree.leaves() <= max_leaves, "{grow:?}: {}", tree.leaves());
            assert!(tree.leaves() > 4);
        }
    }
}

#[test]
fn a_missing_value_follows_the_learned_direction() {
    let mut data = mixed(2000);
    data.columns = 1;
    data.categorical = vec![];
    data.values =
        (0..2000).map(|row| if row % 3 == 0 { f32::NAN } else { uniform(5, row) }).collect();
    data.label = data.values.iter().map(|x| if x.is_nan() { 5.0 } else { *x }).collect();
    let model = train(&data, &Params { rounds: 30, ..Params::default() }, 2, 1);
    assert!((model.predict_row(&[f32::NAN])[0] - 5.0).abs() < 0.05);
    assert!((model.predict_row(&[0.5])[0] - 0.5).abs() < 0.05);
}
