//! Step times against tables, with one set of constants for each machine.

use std::collections::BTreeMap;

use crate::errors::{mean_error, rank_correlation};
use crate::tables::{Row, b200, bigscience, korthikanti, sc21, torchtitan, vtrain};

fn seconds(rows: &[Row]) -> Vec<(String, f64, f64)> {
    let known = rows.iter().filter_map(|row| row.seconds.map(|seconds| (row, seconds)));
    known.map(|(row, seconds)| (row.name.clone(), row.estimate().step_s, seconds)).collect()
}

fn correlation(rows: &[(String, f64, f64)]) -> f64 {
    let pairs: Vec<(f64, f64)> = rows.iter().map(|(_, foretold, measured)| (*foretold, *measured)).collect();
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
    assert!(mean_error("torchtitan, s", &seconds(&torchtitan())) < 0.10);
}

#[test]
fn megatron_core_on_b200s() {
    assert!(mean_error("B200, s", &seconds(&b200())) < 0.10);
}

#[test]
fn the_bigscience_sweep() {
    let rows = seconds(&bigscience());
    assert!(mean_error("BigScience, s", &rows) < 0.15);
    let alike = correlation(&rows);
    println!("rank correlation {alike:.3}");
    assert!(alike > 0.8);
}

/// 720 layouts of small models on one node; within each model and number of ranks the order counts, and the layout
/// that would be chosen for a global batch is hardly slower than the best that was measured.
#[test]
fn vtrain_on_one_node() {
    let rows = vtrain();
    let times = seconds(&rows);
    assert!(mean_error("vTrain, s", &times) < 0.12);
    let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, row) in rows.iter().enumerate() {
        groups.entry(&row.group).or_default().push(number);
    }
    for (group, members) in groups {
        let of_group: Vec<(String, f64, f64)> = members.iter().map(|number| times[*number].clone()).collect();
        let alike = correlation(&of_group);
        println!("{group}: {} rows, rank correlation {alike:.3}", members.len());
        assert!(alike >= 0.9, "{group}: {alike}");
        let mut batches: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for number in members {
            batches.entry(rows[number].plan.train.global_batch).or_default().push(number);
        }
        for (batch, members) in batches {
            let chosen = members.iter().min_by(|a, b| times[**a].1.total_cmp(&times[**b].1)).unwrap();
            let best = members.iter().map(|number| times[*number].2).fold(f64::INFINITY, f64::min);
            let slower = times[*chosen].2 / best - 1.0;
            println!("  global batch {batch}: {} is {:.1}% slower than the best", times[*chosen].0, 100.0 * slower);
            assert!(slower <= 0.02, "{group}, global batch {batch}: {} is {slower} slower", times[*chosen].0);
        }
    }
}
