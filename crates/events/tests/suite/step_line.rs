//! The step line as it is documented.

use lockstep_events::StepReport;
use std::time::Duration;

fn full() -> StepReport {
    StepReport {
        loss: Some(2.34149),
        grad_norm: Some(0.9123),
        lr: Some(3e-4),
        tokens_per_s: Some(18_204.3),
        mfu: Some(0.412),
        comm_exposed: Some(0.031),
        mem_bytes: Some(1_524_713_390),
        mem_planned_bytes: Some(1_556_925_645),
        eta: Some(Duration::from_secs(134)),
        ..StepReport::of(120, 1000)
    }
}

#[test]
fn everything_known() {
    let line = "step 120/1000 | loss 2.3415 | grad norm 0.912 | lr 3.0e-4 | 18,204 tok/s | mfu 41.2% | \
                comm exposed 3.1% | mem 1.42/1.45 GiB | eta 2m14s";
    assert_eq!(full().to_string(), line);
}

#[test]
fn expert_load_imbalance_and_dropped_tokens_are_shown() {
    let report = StepReport {
        loss: Some(2.5),
        expert_load_min: Some(0.614),
        expert_load_max: Some(1.837),
        expert_imbalance: Some(1.42),
        ..StepReport::of(1, 10)
    };
    let line = "step 1/10 | loss 2.5000 | expert load 0.61-1.84 | imbalance 1.42";
    assert_eq!(report.to_string(), line);
    let report = StepReport { dropped_fraction: Some(0.021), ..report };
    assert_eq!(report.to_string(), format!("{line} | dropped 2.1%"));
}

#[test]
fn what_is_unknown_is_left_out() {
    let cases = [
        (StepReport::of(1, 10), "step 1/10"),
        (
            StepReport { eval_loss: Some(1.25), ..StepReport::of(10, 10) },
            "step 10/10 | eval loss 1.2500",
        ),
        (StepReport { loss: Some(f64::NAN), ..StepReport::of(2, 10) }, "step 2/10 | loss NaN"),
        (
            StepReport { mem_bytes: Some(1 << 30), lr: Some(1.26e-5), ..StepReport::of(3, 10) },
            "step 3/10 | lr 1.3e-5 | mem 1.00 GiB",
        ),
        (
            StepReport {
                mem_bytes: Some(11 << 20),
                mem_planned_bytes: Some(4_900_000),
                ..StepReport::of(3, 10)
            },
            "step 3/10 | mem 11.0/4.7 MiB",
        ),
        // A forecast alone is no measurement.
        (StepReport { mem_planned_bytes: Some(1 << 30), ..StepReport::of(3, 10) }, "step 3/10"),
        (
            StepReport { mfu: None, comm_exposed: None, eta: None, ..full() },
            "step 120/1000 | loss 2.3415 | grad norm 0.912 | lr 3.0e-4 | 18,204 tok/s | mem 1.42/1.45 GiB",
        ),
    ];
    for (report, line) in cases {
        assert_eq!(report.to_string(), line);
    }
}
