//! `metrics.jsonl`: what is written is read, and what a crash leaves is lived with.

use crate::folder::Folder;
use lockstep_events::{Metrics, StepReport, read};
use std::fs;

fn reports() -> Vec<StepReport> {
    let mut last = StepReport { eval_loss: Some(0.1 + 0.2), ..StepReport::of(3, 3) };
    last.more.insert("bubble".into(), 0.25.into());
    vec![
        StepReport {
            loss: Some(2.3),
            grad_norm: Some(1.0),
            lr: Some(3e-4),
            tokens_per_s: Some(1e4),
            mfu: Some(0.4),
            comm_exposed: Some(0.0),
            mem_bytes: Some(u64::MAX),
            mem_planned_bytes: Some(1),
            tokens: Some(4096),
            elapsed_s: Some(0.5),
            ..StepReport::of(1, 3)
        },
        StepReport::of(2, 3),
        last,
    ]
}

#[test]
fn lines_are_json_with_the_documented_keys() {
    let folder = Folder::new("lines");
    let path = folder.file("metrics.jsonl");
    let mut metrics = Metrics::open(&path).unwrap();
    for (index, report) in reports().iter().enumerate() {
        metrics.write(report).unwrap();
        // Each line is there at once, while the file is still open.
        assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), index + 1);
    }
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "{\"step\":1,\"steps\":3,\"loss\":2.3,\"grad_norm\":1.0,\"lr\":0.0003,\"tokens_per_s\":10000.0,\"mfu\":0.4,\
             \"comm_exposed\":0.0,\"mem_bytes\":18446744073709551615,\"mem_planned_bytes\":1,\"tokens\":4096,\
             \"elapsed_s\":0.5}",
            "{\"step\":2,\"steps\":3}",
            "{\"step\":3,\"steps\":3,\"eval_loss\":0.30000000000000004,\"bubble\":0.25}",
        ]
    );
    assert_eq!(read(&path).unwrap(), reports());
}

#[test]
fn what_json_cannot_say_is_null() {
    let folder = Folder::new("nan");
    let path = folder.file("metrics.jsonl");
    let report = StepReport { loss: Some(f64::NAN), ..StepReport::of(1, 1) };
    Metrics::open(&path).unwrap().write(&report).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1,\"steps\":1,\"loss\":null}\n");
    assert_eq!(read(&path).unwrap(), [StepReport::of(1, 1)]);
}

/// Every place at which the last line can be torn.
#[test]
fn a_torn_last_line_is_not_read_and_does_not_spoil_the_next() {
    let folder = Folder::new("torn");
    let path = folder.file("metrics.jsonl");
    let mut metrics = Metrics::open(&path).unwrap();
    metrics.write(&StepReport::of(1, 9)).unwrap();
    let first = fs::metadata(&path).unwrap().len() as usize;
    metrics.write(&StepReport { loss: Some(1.5), ..StepReport::of(2, 9) }).unwrap();
    drop(metrics);
    let whole = fs::read(&path).unwrap();
    for end in first..whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        // Without its line break the line is whole all the same.
        let seen = if end == whole.len() - 1 { 2 } else { 1 };
        assert_eq!(read(&path).unwrap().len(), seen, "torn at {end}");
        Metrics::open(&path).unwrap().write(&StepReport::of(3, 9)).unwrap();
        assert_eq!(
            read(&path).unwrap(),
            [StepReport::of(1, 9), StepReport::of(3, 9)],
            "torn at {end}"
        );
    }
}

#[test]
fn steps_that_are_taken_again_are_dropped() {
    let folder = Folder::new("again");
    let path = folder.file("metrics.jsonl");
    let steps =
        |path: &_| -> Vec<usize> { read(path).unwrap().iter().map(|report| report.step).collect() };
    for (after, left) in
        [(0, vec![]), (2, vec![1, 2, 2]), (3, vec![1, 2, 2, 3]), (9, vec![1, 2, 2, 3])]
    {
        // A step may have two lines, and the last may be torn.
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":2}\n{\"step\":3}\n{\"st").unwrap();
        let mut metrics = Metrics::open_after(&path, after).unwrap();
        assert_eq!(steps(&path), left, "after {after}");
        metrics.write(&StepReport::of(10, 10)).unwrap();
        assert_eq!(steps(&path).last(), Some(&10));
    }
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no other file remains");
    let fresh = folder.file("fresh.jsonl");
    Metrics::open_after(&fresh, 5).unwrap();
    assert!(steps(&fresh).is_empty());
}

#[test]
fn torn_lines_longer_than_a_page() {
    let folder = Folder::new("long");
    let path = folder.file("metrics.jsonl");
    for (text, left) in
        [("x".repeat(10_000), 0), (format!("{{\"step\":1}}\n{}", "x".repeat(9_000)), 11)]
    {
        fs::write(&path, text).unwrap();
        Metrics::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), left);
    }
}

#[test]
fn a_bad_line_is_named() {
    let folder = Folder::new("bad");
    let path = folder.file("metrics.jsonl");
    fs::write(&path, "{\"step\":1}\n{\"step\":\n{\"step\":3}\n").unwrap();
    let error = read(&path).unwrap_err().to_string();
    assert!(error.contains("metrics.jsonl line 2: "), "{error}");
    let error = read(&folder.file("none.jsonl")).unwrap_err().to_string();
    assert!(error.starts_with("cannot read ") && error.contains("none.jsonl"), "{error}");
}
