//! Single operations compared with measurements: matmuls and attention by shape, and a whole layer.

use crate::errors::mean_error;
use crate::tables::{Cells, korthikanti, read};
use lockstep_plan::{Plan, Recompute};
use lockstep_sim::{Accelerator, MatmulCall, estimate, grouped, matmul};

const A100: &str = include_str!("../measured/simumax_a100_pcie_op_efficiency.csv");
const B200: &str = include_str!("../measured/simumax_b200_bf16_ceperm_op_efficiency.csv");

/// A number in a shape like `b=1, m=4096, k=5120`.
fn size(row: &Cells, name: &str) -> Option<f64> {
    let sizes = row.text("shape").split(", ").filter_map(|pair| pair.split_once('='));
    sizes.into_iter().find(|(key, _)| *key == name)?.1.parse().ok()
}

/// Predicted and measured fraction of the peak of every matmul.
fn matmuls(device: &str, file: &str) -> Vec<(String, f64, f64)> {
    let device = Accelerator::built_in(device).unwrap();
    let rate = device.peak.bf16 * 1e12;
    let rows = read(file);
    let matmuls = rows.iter().filter(|row| row.text("op") == "matmul");
    matmuls
        .map(|row| {
            let [m, k, n] = ["m", "k", "n"].map(|name| size(row, name).unwrap());
            let sums = row.text("shape").contains("accumulate=True");
            let seconds = matmul(
                &device,
                &MatmulCall { dims: [m, k, n], count: 1.0, width: 2.0, rate, sums },
            );
            let reached = 2.0 * m * k * n / seconds / rate;
            (format!("{m} {k} {n}"), reached, row.number("measured_efficiency").unwrap())
        })
        .collect()
}

#[test]
fn matmuls_by_shape() {
    let a100 = matmuls("a100-80", A100);
    assert_eq!(a100.len(), 183);
    assert!(mean_error("matmuls on an A100, of the peak", &a100) < 0.05);
    let b200 = matmuls("b200", B200);
    assert_eq!(b200.len(), 514);
    assert!(mean_error("matmuls on a B200, of the peak", &b200) < 0.12);
}

/// "Reducing Activation Recomputation", Table 4: a layer of the 22-billion model, in milliseconds. No constant was
/// fitted on it.
#[test]
fn layers_of_korthikanti_table_4() {
    let rows = read(include_str!("../measured/korthikanti_table4_layer_times.csv"));
    let model = korthikanti().swap_remove(0);
    let passes = |plan: &Plan| {
        let stage = estimate(plan, &model.cluster, &model.options).stages.swap_remove(0);
        [stage.forward, stage.input + stage.weights]
    };
    let mut compared = Vec::new();
    for row in &rows {
        let experiment = row.text("experiment");
        let mut plan = model.plan.clone();
        plan.layout.sequence = experiment.contains("sequence");
        plan.layout.recompute = match experiment {
            with if with.contains("selective") => Recompute::Selective,
            with if with.contains("with recompute") => Recompute::Full,
            _ => Recompute::None,
        };
        // The time of a layer is the difference between two models that differ by one layer.
        let more = passes(&plan);
        plan.model.layers -= 1;
        let less = passes(&plan);
        for (at, column) in ["forward_ms", "backward_ms"].into_iter().enumerate() {
            let name = format!("{experiment}, {column}");
            compared.push((name, 1e3 * (more[at] - less[at]), row.number(column).unwrap()));
        }
    }
    assert!(mean_error("layers of the 22B model, ms", &compared) < 0.05);
}

/// Grouped matmuls of experts with M rows each: forward, input gradient and weight gradient.
#[test]
fn grouped_matmuls_by_shape() {
    let device = Accelerator::built_in("b200").unwrap();
    let rate = device.peak.bf16 * 1e12;
    let rows = read(B200);
    // Only weight gradients that accumulate in f32 are compared.
    let wanted = |row: &&Cells| {
        row.text("op") == "group_matmul" && row.text("shape").contains("main_grad_dtype=fp32")
    };
    let of_groups = rows.iter().filter(wanted);
    let compared: Vec<(String, f64, f64)> = of_groups
        .map(|row| {
            let [count, m, n, k] = ["ng", "M", "N", "K"].map(|name| size(row, name).unwrap());
            let shape = row.text("shape");
            let stage =
                ["bwd_grad_act", "bwd_grad_w"].into_iter().find(|stage| shape.contains(stage));
            let dims = match stage {
                None => [m, k, n],
                Some("bwd_grad_act") => [m, n, k],
                _ => [n, m, k],
            };
            let sums = stage == Some("bwd_grad_w");
            let device_s = grouped(&device, &MatmulCall { dims, count, width: 2.0, rate, sums });
            // With few rows, kernel launches dominate.
            let seconds = device_s.max(2.0 * count * device.launch_us * 1e-6);
            let reached = 2.0 * count * m * k * n / seconds / rate;
            let name = format!("{count} of {m} {k} {n} {}", stage.unwrap_or("fwd"));
            (name, reached, row.number("measured_efficiency").unwrap())
        })
        .collect();
    assert_eq!(compared.len(), 60);
    assert!(mean_error("grouped matmuls on a B200, of the peak", &compared) < 0.20);
}
