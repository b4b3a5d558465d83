//! States of runs, and folders that are damaged.

use lockstep_dash::{MetricsReader, RunFolder, RunState};

use crate::fake_run::FakeRun;

fn state(run: &FakeRun) -> RunState {
    RunFolder::open(&run.path).unwrap().state
}

#[test]
fn states() {
    let mut run = FakeRun::new("states", 2, &["layout.data=2"]);
    assert_eq!(state(&run), RunState::Starting, "an empty folder");
    assert_eq!(state(run.write()), RunState::Finished);
    run.steps = 50;
    assert_eq!(state(run.write()), RunState::Stopped);
    std::fs::write(run.path.join("lock"), "{}").unwrap();
    assert_eq!(state(&run), RunState::Running, "the lock is fresh");
    std::fs::remove_file(run.path.join("lock")).unwrap();
    assert_eq!(state(run.fail(1, "was killed by SIGKILL", &[])), RunState::Failed);
    std::fs::write(run.path.join("generation"), "2").unwrap();
    assert_eq!(state(&run), RunState::Stopped, "a later generation went on");
}

#[test]
fn the_end_of_long_metrics_starts_with_a_whole_line() {
    let run = FakeRun::new("long", 1, &[]);
    let path = run.write().path.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.last().unwrap().len() as u64 + 1;
    let read = |bytes: u64| {
        let mut reader = MetricsReader::at_end(&path, bytes).unwrap();
        reader.update().unwrap();
        (reader.reports.len(), reader.damaged)
    };
    assert_eq!(read(last), (1, 0));
    assert_eq!(read(last - 1), (0, 0));
    assert_eq!(read(last + 1), (1, 0));
    assert_eq!(read(text.len() as u64 - 1), (lines.len() - 1, 0));
    assert_eq!(read(text.len() as u64), (lines.len(), 0));
    assert_eq!(read(u64::MAX), (lines.len(), 0));
    let (whole, end) =
        (RunFolder::open(&run.path).unwrap(), RunFolder::open_end(&run.path).unwrap());
    assert_eq!((whole.progress(), whole.state), (end.progress(), end.state));
}

#[test]
fn damaged_and_truncated_metrics_are_tolerated() {
    let run = FakeRun::new("damaged", 1, &[]);
    let path = run.write().path.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path).unwrap();
    let (line, rest) = text.split_once('\n').unwrap();
    std::fs::write(&path, format!("{line}\n{{\"step\": oops\n\u{0}\u{1}\n{rest}{{\"step\":"))
        .unwrap();
    let folder = RunFolder::open(&run.path).unwrap();
    assert_eq!((folder.metrics.reports.len(), folder.metrics.damaged), (10, 2));
    let diagnosis = run.diagnose();
    assert!(diagnosis.notes.iter().any(|note| note.contains("2 damaged line(s)")), "{diagnosis}");
}

#[test]
fn a_missing_folder_is_an_error() {
    assert!(RunFolder::open("no/such/run".as_ref()).is_err());
}

#[test]
fn an_empty_folder_has_a_verdict() {
    let run = FakeRun::new("empty", 1, &[]);
    let diagnosis = run.diagnose();
    assert_eq!(diagnosis.verdict, "there is no report to judge yet");
    assert_eq!(diagnosis.exit_code(), 0);
}
