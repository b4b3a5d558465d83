//! Learning rate schedules at their boundaries.

use lockstep_plan::{Curve, LearningRate};

fn schedule(curve: Curve, warmup: usize, decay_steps: usize) -> LearningRate {
    LearningRate { peak: 1.0, min: 0.1, warmup, steps: 100, curve, decay_steps }
}

#[test]
fn boundaries() {
    use Curve::*;
    #[rustfmt::skip]
    let cases = [
        // curve, warm-up, decay; then (step, rate)
        (Constant, 0, 0, vec![(1, 1.0), (50, 1.0), (100, 1.0), (200, 1.0)]),
        (Constant, 10, 0, vec![(1, 0.1), (9, 0.9), (10, 1.0), (100, 1.0)]),
        (Linear, 0, 0, vec![(1, 0.991), (50, 0.55), (100, 0.1), (200, 0.1)]),
        (Linear, 20, 0, vec![(1, 0.05), (20, 1.0), (60, 0.55), (100, 0.1)]),
        (Cosine, 20, 0, vec![(1, 0.05), (20, 1.0), (60, 0.55), (100, 0.1), (101, 0.1)]),
        (Cosine, 0, 0, vec![(25, 0.1 + 0.9 * 0.8535533905932737), (75, 0.1 + 0.9 * 0.14644660940672624)]),
        (Wsd, 10, 20, vec![(5, 0.5), (10, 1.0), (80, 1.0), (81, 0.955), (90, 0.55), (100, 0.1), (150, 0.1)]),
        // No decay, and a decay that is longer than the steps after the warm-up.
        (Wsd, 0, 0, vec![(1, 1.0), (100, 1.0)]),
        (Wsd, 50, 80, vec![(25, 0.5), (50, 1.0), (75, 0.55), (100, 0.1)]),
        // Warm-up over the whole run: the peak is the last step.
        (Cosine, 100, 0, vec![(1, 0.01), (99, 0.99), (100, 1.0)]),
    ];
    for (curve, warmup, decay, points) in cases {
        let schedule = schedule(curve, warmup, decay);
        for (step, rate) in points {
            let got = schedule.at(step);
            assert!(
                (got - rate).abs() < 1e-12,
                "{curve:?} {warmup} {decay}: step {step}: {got}, not {rate}"
            );
        }
    }
}

#[test]
fn rises_then_falls() {
    for curve in [Curve::Linear, Curve::Cosine, Curve::Wsd, Curve::Constant] {
        let schedule = schedule(curve, 30, 20);
        let rates: Vec<f64> = (1..=100).map(|step| schedule.at(step)).collect();
        assert!(rates[..30].is_sorted(), "{curve:?}");
        assert!(rates[29..].is_sorted_by(|a, b| a >= b), "{curve:?}");
    }
}

#[test]
#[should_panic(expected = "steps count from 1")]
fn there_is_no_step_0() {
    schedule(Curve::Cosine, 0, 0).at(0);
}
