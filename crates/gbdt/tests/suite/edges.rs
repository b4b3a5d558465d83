//! Empty shards, degenerate columns and labels: each works or is rejected with a reason.

use lockstep_comm::{on_threads_with, single_rank};
use lockstep_gbdt::{Matrix, ModelFormat, Objective, Params, Table, Team};

use crate::support::{Data, binary, mixed, options, train};

fn one_column(values: Vec<f32>, label: Vec<f32>) -> Data {
    Data { columns: 1, values, label, weight: None, group: None, categorical: vec![] }
}

fn params() -> Params {
    Params { rounds: 3, min_child_weight: 0.0, ..Params::default() }
}

#[test]
fn more_ranks_than_rows() {
    let data = one_column(vec![1.0, 2.0, 3.0], vec![1.0, 2.0, 5.0]);
    let alone = train(&data, &params(), 1, 1).to_bytes(ModelFormat::Json);
    for ranks in [2, 3, 4, 8] {
        assert!(train(&data, &params(), ranks, 2).to_bytes(ModelFormat::Json) == alone, "{ranks}");
    }
}

#[test]
fn one_row() {
    let data = one_column(vec![1.0], vec![4.0]);
    for ranks in [1, 2] {
        let model = train(&data, &params(), ranks, 1);
        assert_eq!(model.trees[0].nodes(), 1);
        assert_eq!(model.predict_row(&[1.0]), [4.0]);
    }
}

#[test]
fn constant_and_missing_columns() {
    let rows = 40;
    let values = (0..rows).flat_map(|row| [3.0, f32::NAN, (row % 2) as f32]).collect();
    let label = (0..rows).map(|row| (row % 2) as f32).collect();
    let data = Data { columns: 3, ..one_column(values, label) };
    let model = train(&data, &params(), 3, 1);
    assert!(model.trees.iter().all(|tree| {
        (0..tree.nodes()).all(|node| tree.is_leaf(node) || tree.feature[node] == 2)
    }));
    let useless = Data { columns: 1, values: vec![f32::NAN; rows], ..data };
    let model = train(&useless, &params(), 2, 1);
    assert!(model.trees.iter().all(|tree| tree.nodes() == 1));
}

#[test]
fn no_columns() {
    let data = Data { columns: 0, ..one_column(vec![], vec![1.0, 3.0]) };
    let model = train(&data, &params(), 2, 1);
    assert_eq!(model.predict_row(&[]), [2.0]);
}

#[test]
fn labels_of_one_class() {
    for label in [0.0, 1.0] {
        let data = one_column((0..20).map(|x| x as f32).collect(), vec![label; 20]);
        let params = Params { objective: Objective::Logistic, ..params() };
        let model = train(&data, &params, 2, 1);
        let p = model.predict_row(&[3.0])[0];
        assert!((p - label).abs() < 1e-3 && p.is_finite(), "{p}");
    }
}

#[test]
fn a_column_with_one_value_and_missing_ones() {
    let values = (0..30).map(|row| if row % 3 == 0 { f32::NAN } else { 1.0 }).collect();
    let label = (0..30).map(|row| f32::from(u8::from(row % 3 == 0))).collect();
    let data = one_column(values, label);
    let model = train(&data, &Params { rounds: 30, ..params() }, 2, 1);
    assert!(model.predict_row(&[f32::NAN])[0] > 0.9);
    assert!(model.predict_row(&[1.0])[0] < 0.1);
}

#[test]
fn rows_without_weight() {
    let mut data = mixed(300);
    data.weight = Some(vec![0.0; 300]);
    let model = train(&data, &params(), 2, 1);
    assert!(model.trees.iter().all(|tree| tree.nodes() == 1));
}

fn error(table: &Table, params: &Params) -> String {
    let (world, team) = (single_rank(), Team::new(1));
    let matrix = Matrix::new(&world, table, None, params.max_bin, &team);
    let trained = matrix.and_then(|matrix| lockstep_gbdt::train(&world, &matrix, params));
    trained.map(drop).expect_err("an error").to_string()
}

#[test]
fn invalid_labels_weights_and_values_are_rejected() {
    let table = |values: &[f32], label: &[f32]| {
        Table::dense(vec!["x".into()], values.to_vec(), label.to_vec())
    };
    let good = table(&[1.0, 2.0], &[0.0, 1.0]);
    let plain = Params::default();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert!(error(&table(&[1.0, 2.0], &[0.0, bad]), &plain).contains("the label of row 1"));
        let mut weighted = table(&[1.0, 2.0], &[0.0, 1.0]);
        weighted.weight = Some(vec![bad, 1.0]);
        assert!(error(&weighted, &plain).contains("the weight of row 0"));
    }
    let mut negative = table(&[1.0, 2.0], &[0.0, 1.0]);
    negative.weight = Some(vec![1.0, -1.0]);
    assert!(error(&negative, &plain).contains("the weight of row 1 is -1"));
    let infinite = table(&[1.0, f32::INFINITY], &[0.0, 1.0]);
    assert!(error(&infinite, &plain).contains("row 2 of this rank: feature \"x\" is infinite"));
    let half = table(&[1.0, 2.0], &[0.0, 1.5]);
    let logistic = Params { objective: Objective::Logistic, ..Params::default() };
    assert!(error(&half, &logistic).contains("the label of row 2 is 1.5"));
    let softmax = Params { objective: Objective::Softmax, classes: 2, ..Params::default() };
    assert!(error(&half, &softmax).contains("an integer from 0 to 1"));
    let rank = Params { objective: Objective::Rank, ..Params::default() };
    assert!(error(&good, &rank).contains("set data.group"));
    assert!(error(&table(&[], &[]), &plain).contains("no rows"));
    let monotone = Params { monotone: [("y".to_string(), 1)].into(), ..Params::default() };
    assert!(error(&good, &monotone).contains("there is no such feature"));
    let mut scattered = table(&[1.0, 2.0, 3.0], &[0.0, 1.0, 1.0]);
    scattered.group = Some(vec![1, 2, 1]);
    assert!(error(&scattered, &rank).contains("not consecutive"));
    let mut category = table(&[0.5, 1.0], &[0.0, 1.0]);
    category.categories = vec![Some(vec![])];
    category.chunks.iter().for_each(|chunk| assert_eq!(chunk.rows, 2));
    let mut below = table(&[-1.0, 1.0], &[0.0, 1.0]);
    below.categories = vec![Some(vec![])];
    assert!(error(&below, &plain).contains("use codes from 0"));
}

/// All ranks fail when one has a bad row, instead of waiting for it.
#[test]
fn an_error_on_one_rank_stops_all() {
    let errors = on_threads_with(&options(), 3, |world| {
        let label = if world.rank() == 2 { f32::NAN } else { 1.0 };
        let table = Table::dense(vec!["x".into()], vec![1.0], vec![label]);
        Matrix::new(&world, &table, None, 256, &Team::new(1)).err().unwrap().to_string()
    });
    assert_eq!(errors[0], "rank 2: the label of row 0 is NaN");
    assert_eq!(errors[2], "the label of row 0 is NaN");
}

#[test]
fn more_bins_than_values() {
    let data = one_column((0..50).map(|x| x as f32).collect(), (0..50).map(|x| x as f32).collect());
    let few = train(&data, &Params { max_bin: 64, ..params() }, 2, 1);
    let many = train(&data, &Params { max_bin: 60_000, ..params() }, 2, 1);
    assert_eq!(few.trees, many.trees);
}

#[test]
fn an_evaluation_set_may_have_new_missing_values_and_categories() {
    let (world, team) = (single_rank(), Team::new(1));
    let data = binary(mixed(500));
    let matrix = Matrix::new(&world, &data.part(0..500), None, 256, &team).unwrap();
    let mut other = data.part(0..3);
    let mut values = data.values[..3 * data.columns].to_vec();
    values[0] = f32::NAN;
    values[7] = 99.0;
    other.chunks = Table::dense(other.names.clone(), values.clone(), vec![0.0; 3]).chunks;
    let eval = Matrix::new(&world, &other, Some(&matrix.cuts), 256, &team).unwrap();
    assert_eq!(eval.rows, 3);
    let fewer = Table::dense(vec!["x".into()], vec![1.0], vec![0.0]);
    let error = Matrix::new(&world, &fewer, Some(&matrix.cuts), 256, &team).err().unwrap();
    assert!(error.to_string().contains("expected 9"), "{error}");
}
