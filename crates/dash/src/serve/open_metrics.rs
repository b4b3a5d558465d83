//! `GET /metrics`: the newest values of all runs in the OpenMetrics text format, for Prometheus.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;

use super::state::Shared;

/// Name, column and help of each metric.
const METRICS: [(&str, &str, &str); 9] = [
    ("lockstep_step", "step", "Last reported optimizer step."),
    ("lockstep_loss", "loss", "Mean training loss of the last report."),
    ("lockstep_grad_norm", "grad_norm", "Norm of the gradient before clipping."),
    ("lockstep_learning_rate", "lr", "Learning rate."),
    ("lockstep_tokens_per_second", "tokens_per_s", "Tokens per second of all ranks."),
    ("lockstep_mfu_ratio", "mfu", "Model FLOPs utilization, 0 to 1."),
    (
        "lockstep_comm_exposed_ratio",
        "comm_exposed",
        "Exposed communication as a fraction of the step.",
    ),
    ("lockstep_memory_bytes", "mem_bytes", "Peak memory of any rank."),
    (
        "lockstep_expert_imbalance",
        "expert_imbalance",
        "Highest load of an expert relative to the mean.",
    ),
];

pub(super) async fn metrics(State(shared): State<Arc<Shared>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text(&shared))
}

fn text(shared: &Shared) -> String {
    let names = shared.names();
    let mut text = String::new();
    for (metric, column, help) in METRICS {
        let _ = writeln!(text, "# TYPE {metric} gauge\n# HELP {metric} {help}");
        for run in &names {
            if let Some(value) = shared.series(run, |series, _| series.last(column)).flatten() {
                let _ = writeln!(text, "{metric}{{run=\"{}\"}} {value}", escaped(run));
            }
        }
    }
    let _ = writeln!(
        text,
        "# TYPE lockstep_run_state stateset\n# HELP lockstep_run_state State of the run."
    );
    for run in &names {
        if let Some(state) = shared.series(run, |_, state| state) {
            for name in ["starting", "running", "stuck", "finished", "stopped", "failed"] {
                let on = u8::from(state.name() == name);
                let run = escaped(run);
                let _ = writeln!(
                    text,
                    "lockstep_run_state{{run=\"{run}\",lockstep_run_state=\"{name}\"}} {on}"
                );
            }
        }
    }
    text.push_str("# EOF\n");
    text
}

/// A label value: backslash, quote and line end are escaped.
fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn labels_are_escaped() {
        assert_eq!(super::escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
