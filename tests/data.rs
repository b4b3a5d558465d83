//! Tests of the binary: `lockstep data prepare` and `lockstep data inspect`.

mod program;

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory that is removed after the test.
struct Workspace(PathBuf);

impl Workspace {
    fn new(test: &str) -> Workspace {
        let folder = std::env::temp_dir().join(format!("lockstep-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Workspace(folder)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(name), content).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program::lockstep();
        command.arg("data").args(arguments).current_dir(&self.0);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary runs")
    }

    /// Runs a command that must succeed and returns its standard output.
    fn output(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{arguments:?}: {error}");
        assert!(error.is_empty(), "{arguments:?}: no progress bar without a terminal: {error}");
        String::from_utf8(run.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.output(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// Runs a command that must fail and returns its error.
    fn error(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments);
        assert!(!run.status.success(), "{arguments:?} should fail");
        String::from_utf8(run.stderr).unwrap()
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn exists(workspace: &Workspace, name: &str) -> bool {
    Path::new(&workspace.0).join(name).exists()
}

#[test]
fn prepares_and_inspects_jsonl() {
    let workspace = Workspace::new("jsonl");
    workspace.write("a.jsonl", "{\"text\": \"the owl\"}\nbroken\n{\"text\": \"sings ü\"}\n");
    let report = workspace.json(&["prepare", "a.jsonl", "--out", "a.tokens"]);
    assert_eq!(report["files"][0]["documents"], 2);
    assert_eq!(report["files"][0]["tokens"], 15);
    assert_eq!(report["bad"], 1);
    assert_eq!(report["first_bad"][0]["line"], 2);

    let contents = workspace.json(&["inspect", "a.tokens", "--check"]);
    for (key, value) in [("documents", 2), ("tokens", 15), ("vocab", 257), ("end", 256)] {
        assert_eq!(contents[key], value, "{key}");
    }
    assert_eq!(contents["tokenizer"], "bytes");
    assert_eq!(contents["checked"], true);
    assert_eq!(workspace.output(&["inspect", "a.tokens", "--document", "1"]), "sings ü\n");
    assert!(
        workspace
            .output(&["inspect", "a.tokens"])
            .contains("7 to 8 tokens per document, 7.5 on average")
    );
}

#[test]
fn skipped_rows_are_reported() {
    let workspace = Workspace::new("skipped");
    workspace.write("a.jsonl", "{\"text\": \"the owl\"}\n{\"body\": \"x\"}\n{\"text\": \"\"}\n");
    let output = workspace.output(&["prepare", "a.jsonl", "--out", "a.tokens"]);
    for line in [
        "a.tokens: 7 tokens in 1 documents",
        "skipped 1 rows without text",
        "skipped 1 invalid rows",
        "a.jsonl:2: no field \"text\"; fields are: body",
    ] {
        assert!(output.contains(line), "{output}");
    }
}

#[test]
fn prepares_and_splits_text_from_standard_input() {
    let workspace = Workspace::new("pipe");
    let arguments =
        ["prepare", "-", "--format", "text", "--split-on", "\\n\\n", "--out", "p.tokens"];
    let mut command = workspace.command(&arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\n\ntwo\nlines\n\nthree\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(workspace.json(&["inspect", "p.tokens"])["documents"], 3);
    assert_eq!(workspace.output(&["inspect", "p.tokens", "--document", "1"]), "two\nlines\n");
}

#[test]
fn output_does_not_depend_on_the_number_of_threads() {
    let workspace = Workspace::new("threads");
    let text: String =
        (0..20_000).map(|i| format!("line {i}\n{}", if i % 9 == 0 { "\n" } else { "" })).collect();
    workspace.write("a.txt", &text);
    let files = ["1", "2", "5"].map(|threads| {
        let out = format!("{threads}.tokens");
        workspace.output(&["prepare", "a.txt", "--cut", "4K", "--threads", threads, "--out", &out]);
        std::fs::read(workspace.0.join(out)).unwrap()
    });
    assert!(files[0].len() > 2 * text.len());
    assert!(files[0] == files[1] && files[1] == files[2], "the files differ");
}

/// A killed `prepare` leaves no file under the final name, and the next one removes its partial file.
#[test]
fn a_killed_prepare_leaves_no_incomplete_file() {
    let workspace = Workspace::new("killed");
    let mut command = workspace.command(&["prepare", "-", "--format", "text", "--out", "k.tokens"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // More than the capacity of pipes, buffers and batches: once all is sent, a part of it is in the file.
    let lines = "some text on a line\n".repeat(1000);
    (0..1000).for_each(|_| input.write_all(lines.as_bytes()).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!exists(&workspace, "k.tokens"));
    let partial = format!(".k.tokens.partial-{}", child.id());
    assert!(exists(&workspace, &partial), "it was killed while writing");

    workspace.write("a.txt", "text");
    workspace.output(&["prepare", "a.txt", "--out", "k.tokens"]);
    assert!(exists(&workspace, "k.tokens") && !exists(&workspace, &partial));
}

#[test]
fn corrupt_files_are_detected() {
    let workspace = Workspace::new("corrupt");
    workspace.write("a.txt", "some text of many words");
    workspace.output(&["prepare", "a.txt", "--out", "a.tokens"]);
    let mut bytes = std::fs::read(workspace.0.join("a.tokens")).unwrap();
    bytes[200] ^= 1;
    workspace.write("changed.tokens", &bytes);
    workspace.output(&["inspect", "changed.tokens"]);
    assert!(
        workspace
            .error(&["inspect", "changed.tokens", "--check"])
            .contains("the tokens are corrupt")
    );
    workspace.write("cut.tokens", &bytes[..bytes.len() - 1]);
    assert!(workspace.error(&["inspect", "cut.tokens"]).contains("truncated"));
    assert!(workspace.error(&["inspect", "a.txt"]).contains("not a token file"));
}

#[test]
fn errors_suggest_a_fix() {
    let workspace = Workspace::new("errors");
    workspace.write("a.txt", "text");
    workspace.write("a.jsonl", "{\"content\": \"x\"}\n".repeat(10));
    workspace.write("old.tokens", "mine");
    for (arguments, part) in [
        (&["prepare", "a.jsonl", "--out", "x.tokens", "--max-bad", "3"][..], "fields are: content"),
        (&["prepare", "a.jsonl", "--out", "x.tokens"], "no documents in a.jsonl"),
        (&["prepare", "a.txt", "--out", "old.tokens"], "--force"),
        (&["prepare", "a.txt", "--out", "x.tokens", "--cut", "1G"], "at most 32M"),
        (
            &["prepare", "a.txt", "--out", "x.tokens", "--tokenizer", "none.json"],
            "none.json: No such file",
        ),
        (&["prepare", "-", "--out", "x.tokens"], "--format"),
        (&["inspect", "a.txt", "--document", "5"], "not a token file"),
    ] {
        let error = workspace.error(arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
        assert!(!exists(&workspace, "x.tokens"));
    }
}

#[test]
fn inspect_prints_the_entropy_of_the_grammar() {
    let workspace = Workspace::new("grammar");
    let contents = workspace.json(&["inspect", "builtin:grammar", "--seq", "64"]);
    let (floor, rate) = (contents["floor"].as_f64().unwrap(), contents["rate"].as_f64().unwrap());
    assert!((0.5..0.6).contains(&floor) && (0.5..floor).contains(&rate), "{contents}");
    assert_eq!(contents["vocab"], 256);
    assert!(workspace.output(&["inspect", "builtin:grammar"]).contains("nats per token"));
}
