//! Predicted memory compared with published tables.

use crate::errors::{mean_error, worst_error};
use crate::tables::{
    Row, b200, b200_others, bigscience, korthikanti, korthikanti_activations, nanotron, nemo, read,
    sc21, torchtitan, vtrain,
};
use lockstep_sim::{MemoryEstimate, Software, states};

/// Maximum over all ranks.
fn most(row: &Row, of: fn(&MemoryEstimate) -> f64) -> f64 {
    row.estimate().stages.iter().map(|stage| of(&stage.memory)).fold(0.0, f64::max)
}

fn gib(bytes: f64) -> f64 {
    bytes / (1u64 << 30) as f64
}

fn allocated(rows: &[Row]) -> Vec<(String, f64, f64)> {
    let known = rows.iter().filter_map(|row| row.bytes.map(|bytes| (row, bytes)));
    known
        .map(|(row, bytes)| {
            (row.name.clone(), gib(most(row, MemoryEstimate::allocated)), gib(bytes))
        })
        .collect()
}

/// "ZeRO: Memory Optimizations", Table 1: all 54 values, as they are printed.
#[test]
fn zero_table_1() {
    let program =
        Software { weights: 2.0, gradients: 2.0, optimizer: 12.0, ..Software::lockstep() };
    for row in read(include_str!("../measured/zero_table1_memory.csv")) {
        let params = match row.text("model_params") {
            "7.5B" => 7.5e9,
            "128B" => 128e9,
            _ => 1e12,
        };
        for (stage, column) in [(1, "Pos_GB"), (2, "Pos_g_GB"), (3, "Pos_g_p_GB")] {
            let gigabytes =
                states(&program, params, stage, row.count("dp") as f64).iter().sum::<f64>() / 1e9;
            let printed = row.text(column);
            let decimals = printed.split_once('.').map_or(0, |(_, decimals)| decimals.len());
            let unit = 10f64.powi(-(decimals as i32));
            // The paper truncates some values instead of rounding.
            let off = (gigabytes - row.number(column).unwrap()).abs();
            assert!(off < unit, "{params} on {}: {gigabytes} and not {printed}", row.text("dp"));
        }
    }
}

/// Figure 1 of "Reducing Activation Recomputation".
#[test]
fn activations_of_sequence_parallelism_with_selective_recompute() {
    let rows: Vec<(String, f64, f64)> = korthikanti_activations()
        .iter()
        .map(|(row, bytes)| {
            let of = |memory: &MemoryEstimate| memory.activations;
            (row.name.clone(), gib(most(row, of)), gib(*bytes))
        })
        .collect();
    mean_error("activations, GiB", &rows);
    assert!(worst_error(&rows) < 0.03);
}

#[test]
fn allocated_on_b200s() {
    for (name, rows) in [("B200, GiB", b200()), ("B200, other rows, GiB", b200_others())] {
        let rows = allocated(&rows);
        mean_error(name, &rows);
        assert!(worst_error(&rows) < 0.03);
    }
}

#[test]
fn allocated_by_nanotron() {
    assert!(mean_error("nanotron, GiB", &allocated(&nanotron())) < 0.10);
}

/// Runs that failed with out-of-memory are predicted not to fit, all others to fit.
#[test]
fn bigscience_out_of_memory() {
    let rows = bigscience();
    let known = rows.iter().filter_map(|row| row.bytes.map(|bytes| (row, bytes)));
    let all = known
        .map(|(row, bytes)| (row.name.clone(), gib(most(row, MemoryEstimate::total)), gib(bytes)));
    assert!(mean_error("BigScience, GiB", &all.collect::<Vec<_>>()) < 0.12);
    for row in &rows {
        let predicted = row.estimate();
        let needs = gib(most(row, MemoryEstimate::total));
        assert_eq!(!predicted.fits, row.failed, "{} needs {needs:.1} GiB", row.name);
    }
    assert_eq!(rows.iter().filter(|row| row.failed).count(), 3);
}

/// All measured runs fit.
#[test]
fn measured_runs_fit() {
    for rows in
        [korthikanti(), sc21(), torchtitan(), nanotron(), nemo(), b200(), b200_others(), vtrain()]
    {
        for row in rows {
            let needs = gib(most(&row, MemoryEstimate::total));
            assert!(row.estimate().fits, "{} needs {needs:.1} GiB", row.name);
        }
    }
}
