//! Prints predictions next to published values, row by row, with their time breakdown: `cargo run --release -p lockstep-sim
//! --example residuals [TABLE [--memory]]`.

#[path = "../tests/suite/tables/mod.rs"]
#[allow(dead_code)]
mod tables;

use tables::Row;

fn main() {
    let wanted = std::env::args().nth(1);
    type Table = (&'static str, fn() -> Vec<Row>);
    let all: [Table; 11] = [
        ("korthikanti", tables::korthikanti),
        ("sc21", tables::sc21),
        ("torchtitan", tables::torchtitan),
        ("nanotron", tables::nanotron),
        ("nemo", tables::nemo),
        ("b200", tables::b200),
        ("b200-others", tables::b200_others),
        ("qwen3", tables::qwen3),
        ("llama3", tables::llama3),
        ("bigscience", tables::bigscience),
        ("vtrain", tables::vtrain),
    ];
    for (name, rows) in all {
        if wanted.as_ref().is_none_or(|wanted| wanted == name) {
            print(name, &rows());
        }
    }
}

/// Memory of the first and last stage, in GiB.
fn by_use(predicted: &lockstep_sim::Estimate) {
    let stages = &predicted.stages;
    for stage in [stages.first(), stages.last()].into_iter().flatten() {
        let m = stage.memory;
        let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
        println!(
            "    {:6.1} = parameters {:.1} gradients {:.1} optimizer {:.1} activations {:.1} gathered {:.1} logits {:.1} working {:.1} buffers {:.1}",
            gib(m.allocated()),
            gib(m.parameters),
            gib(m.gradients),
            gib(m.optimizer),
            gib(m.activations),
            gib(m.gathered),
            gib(m.logits),
            gib(m.working),
            gib(m.buffers),
        );
    }
}

fn print(name: &str, rows: &[Row]) {
    println!("== {name}");
    let (mut times, mut bytes) = (Vec::new(), Vec::new());
    for row in rows {
        let predicted = row.estimate();
        let time = row.seconds.map(|seconds| predicted.step_s / seconds - 1.0);
        let most = |of: fn(&lockstep_sim::MemoryEstimate) -> f64| {
            predicted.stages.iter().map(|stage| of(&stage.memory)).fold(0.0, f64::max)
        };
        let memory =
            row.bytes.map(|bytes| most(lockstep_sim::MemoryEstimate::allocated) / bytes - 1.0);
        times.extend(time);
        bytes.extend(memory);
        let percent = |error: Option<f64>| {
            error.map_or("      –".into(), |error| format!("{:+6.1}%", 100.0 * error))
        };
        let t = predicted.time;
        let share = |part: f64| 100.0 * part / predicted.step_s;
        println!(
            "{:58} {} {:9.4} s {} {:6.1} GiB{}{} | compute {:.0} host {:.0} tensor {:.0} cp {:.0} expert {:.0} data {:.0} bubble {:.0} step {:.1} %",
            row.name,
            percent(time),
            predicted.step_s,
            percent(memory),
            most(lockstep_sim::MemoryEstimate::total) / (1u64 << 30) as f64,
            if predicted.fits { "" } else { " too much" },
            if row.failed { " (failed)" } else { "" },
            share(t.compute),
            share(t.host),
            share(t.tensor),
            share(t.context),
            share(t.expert),
            share(t.data),
            share(t.bubble),
            share(t.optimizer),
        );
        if std::env::args().any(|word| word == "--memory") {
            by_use(&predicted);
        }
    }
    let mean = |errors: &[f64]| {
        100.0 * errors.iter().map(|error| error.abs()).sum::<f64>() / errors.len().max(1) as f64
    };
    let bias = |errors: &[f64]| 100.0 * errors.iter().sum::<f64>() / errors.len().max(1) as f64;
    println!(
        "{name}: time {:.1}% (bias {:+.1}), memory {:.1}% (bias {:+.1})",
        mean(&times),
        bias(&times),
        mean(&bytes),
        bias(&bytes)
    );
}
