//! Prints the results of `bench comm`: a table, or one JSON object per line.

use super::case::{Case, Measured};
use super::comm::Buffers;
use crate::print::print_line;
use lockstep_comm::{Collective, Dtype, World, human_bytes};
use serde::Serialize;

pub fn print_header(world: &World, engine: &str, dtype: Dtype, buffers: Buffers) {
    let hosts = world.hosts().iter().max().map_or(1, |h| h + 1);
    print_line!(
        "{} ranks on {hosts} host(s), engine {engine}, {}, {} buffers",
        world.size(),
        dtype.name(),
        format!("{buffers:?}").to_lowercase()
    );
    print_line!(
        "{:>10}  {:<15} {:<10} {:>12} {:>12} {:>12} {:>7}",
        "size",
        "operation",
        "algorithm",
        "time (µs)",
        "alg (GB/s)",
        "bus (GB/s)",
        "wrong"
    );
}

#[derive(Serialize)]
struct Record {
    op: &'static str,
    engine: String,
    algo: &'static str,
    ranks: usize,
    dtype: &'static str,
    buffers: Buffers,
    bytes: usize,
    time_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    wrong: u64,
}

pub fn print_row(case: &Case, measured: &Measured, engine: &str, dtype: Dtype, json: bool) {
    let algbw = case.bytes as f64 / measured.seconds / 1e9;
    let record = Record {
        op: case.kind.name(),
        engine: engine.into(),
        algo: measured.algo,
        ranks: measured.ranks,
        dtype: dtype.name(),
        buffers: case.buffers,
        bytes: case.bytes,
        time_us: measured.seconds * 1e6,
        algbw_gbs: algbw,
        busbw_gbs: algbw * bus_factor(case.kind, measured.ranks),
        wrong: measured.wrong,
    };
    if json {
        print_line!("{}", serde_json::to_string(&record).expect("a record is serializable"));
        return;
    }
    print_line!(
        "{:>10}  {:<15} {:<10} {:>12.1} {:>12.2} {:>12.2} {:>7}",
        human_bytes(record.bytes as u64),
        record.op,
        record.algo,
        record.time_us,
        record.algbw_gbs,
        record.busbw_gbs,
        record.wrong
    );
}

/// Bytes that each link must carry per byte of the buffer, for any algorithm (as in nccl-tests).
pub fn bus_factor(kind: Collective, ranks: usize) -> f64 {
    let n = ranks as f64;
    match kind {
        Collective::AllReduce => 2.0 * (n - 1.0) / n,
        Collective::Reduce | Collective::Broadcast => 1.0,
        _ => (n - 1.0) / n,
    }
}
