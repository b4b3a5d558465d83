//! Step times compared with published tables, with one set of constants per machine.

use std::collections::BTreeMap;

use crate::errors::{mean_error, rank_correlation, worst_error};
use crate::tables::{
    Row, b200, b200_others, bigscience, korthikanti, llama3, nemo, qwen3, sc21, torchtitan, vtrain,
};

fn seconds(rows: &[Row]) -> Vec<(String, f64, f64)> {
    let known = rows.iter().filter_map(|row| row.seconds.map(|seconds| (row, seconds)));
    known.map(|(row, seconds)| (row.name.clone(), row.estimate().step_s, seconds)).collect()
}

fn correlation(rows: &[(String, f64, f64)]) -> f64 {
    let pairs: Vec<(f64, f64)> =
        rows.iter().map(|(_, predicted, measured)| (*predicted, *measured)).collect();
    rank_correlation(&pairs)
}

#[test]
fn korthikanti_table_5() {
    assert!(mean_error("Korthikanti, Table 5, s", &seconds(&korthikanti())) < 0.04);
}

#[test]
fn megatron_sc21_table_1() {
    assert!(mean_error("Megatron SC'21, Table 1, s", &seconds(&sc21())) < 0.06);
}

#[test]
fn torchtitan_on_h100s() {
    assert!(mean_error("torchtitan, s", &seconds(&torchtitan())) < 0.08);
}

#[test]
fn nemo_with_long_sequences() {
    assert!(mean_error("NeMo, s", &seconds(&nemo())) < 0.04);
}

#[test]
fn megatron_core_on_b200s() {
    assert!(mean_error("B200, s", &seconds(&b200())) < 0.12);
    assert!(mean_error("B200, other rows, s", &seconds(&b200_others())) < 0.13);
}

#[test]
fn llama_3_on_thousands_of_h100s() {
    let rows = seconds(&llama3());
    mean_error("Llama 3 405B, s", &rows);
    assert!(worst_error(&rows) < 0.12);
}

/// Two rows are outliers: one shards parameters across all ranks and overlaps more than predicted, the other is much
/// slower than similar rows.
#[test]
fn qwen_3_with_experts_across_hosts() {
    let rows = seconds(&qwen3());
    assert!(mean_error("Qwen3 235B, s", &rows) < 0.12);
    let off = |row: &&(String, f64, f64)| (row.1 / row.2 - 1.0).abs() > 0.10;
    assert!(rows.iter().filter(off).count() <= 2);
}

#[test]
fn the_bigscience_sweep() {
    let rows = seconds(&bigscience());
    assert!(mean_error("BigScience, s", &rows) < 0.08);
    let order = correlation(&rows);
    println!("rank correlation {order:.3}");
    assert!(order > 0.85);
}

/// 720 layouts of small models on one node. Checks the order within each model and number of ranks, and that the predicted
/// best layout is nearly as fast as the measured best.
#[test]
fn vtrain_on_one_node() {
    let rows = vtrain();
    let times = seconds(&rows);
    assert!(mean_error("vTrain, s", &times) < 0.10);
    let (mut orders, mut choices, mut of_batches) = (Vec::new(), Vec::new(), Vec::new());
    for (group, members) in grouped(&rows, |row| row.group.clone()) {
        let of_group: Vec<(String, f64, f64)> =
            members.iter().map(|number| times[*number].clone()).collect();
        orders.push((correlation(&of_group), group.clone()));
        choices.push(chosen(&rows, &times, &members));
    }
    for (_, members) in
        grouped(&rows, |row| format!("{} {}", row.group, row.plan.train.global_batch))
    {
        of_batches.push(chosen(&rows, &times, &members));
    }
    for ((order, group), (name, slower)) in orders.iter().zip(&choices) {
        println!(
            "{group}: rank correlation {order:.3}; {name} is {:.1}% slower than the best",
            100.0 * slower
        );
    }
    let mean = of_batches.iter().map(|(_, slower)| slower).sum::<f64>() / of_batches.len() as f64;
    let exact = of_batches.iter().filter(|(_, slower)| *slower <= 0.02).count();
    println!(
        "for a given global batch: {exact} of {} choices within 2%, {:.1}% on average",
        of_batches.len(),
        100.0 * mean
    );
    for (name, slower) in of_batches.iter().filter(|(_, slower)| *slower > 0.02) {
        println!("  {name} is {:.1}% slower than the best", 100.0 * slower);
    }
    // Current accuracy: one choice in six is off by more, up to 40%.
    assert!(exact >= 115 && mean < 0.03);
    for (order, group) in orders {
        assert!(order >= 0.9, "{group}: {order}");
    }
    for (name, slower) in choices {
        assert!(slower <= 0.02, "{name} is {slower} slower than the best");
    }
}

fn grouped(rows: &[Row], key: impl Fn(&Row) -> String) -> BTreeMap<String, Vec<usize>> {
    let mut groups: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, row) in rows.iter().enumerate() {
        groups.entry(key(row)).or_default().push(number);
    }
    groups
}

/// The row with the highest predicted throughput, and how much slower it is than the measured best.
fn chosen(rows: &[Row], times: &[(String, f64, f64)], members: &[usize]) -> (String, f64) {
    let per_sequence =
        |number: usize, seconds: f64| seconds / rows[number].plan.train.global_batch as f64;
    let predicted = |number: &usize| per_sequence(*number, times[*number].1);
    let measured = |number: &usize| per_sequence(*number, times[*number].2);
    let chosen = members.iter().min_by(|a, b| predicted(a).total_cmp(&predicted(b))).unwrap();
    let best = members.iter().map(measured).fold(f64::INFINITY, f64::min);
    (times[*chosen].0.clone(), measured(chosen) / best - 1.0)
}
