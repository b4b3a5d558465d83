//! `lockstep data` as its users run it: the real binary, on real files.

use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A folder that goes away with the test.
struct Desk(PathBuf);

impl Desk {
    fn new(test: &str) -> Desk {
        let folder = std::env::temp_dir().join(format!("lockstep-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Desk(folder)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(name), content).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command.arg("data").args(arguments).current_dir(&self.0);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the binary runs")
    }

    /// What a command that must succeed prints.
    fn ok(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments);
        let error = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success(), "{arguments:?}: {error}");
        assert!(error.is_empty(), "{arguments:?}: no bar without a terminal: {error}");
        String::from_utf8(run.stdout).unwrap()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// What a command that must fail says.
    fn fails(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments);
        assert!(!run.status.success(), "{arguments:?} should fail");
        String::from_utf8(run.stderr).unwrap()
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn exists(desk: &Desk, name: &str) -> bool {
    Path::new(&desk.0).join(name).exists()
}

#[test]
fn jsonl_goes_in_and_comes_out() {
    let desk = Desk::new("jsonl");
    desk.write("a.jsonl", "{\"text\": \"the owl\"}\nbroken\n{\"text\": \"sings ü\"}\n");
    let made = desk.json(&["prepare", "a.jsonl", "--out", "a.tokens"]);
    assert_eq!(made["files"][0]["documents"], 2);
    assert_eq!(made["files"][0]["tokens"], 15);
    assert_eq!(made["bad"], 1);
    assert_eq!(made["first_bad"][0]["line"], 2);

    let inside = desk.json(&["inspect", "a.tokens", "--check"]);
    for (key, value) in [("documents", 2), ("tokens", 15), ("vocab", 257), ("end", 256)] {
        assert_eq!(inside[key], value, "{key}");
    }
    assert_eq!(inside["tokenizer"], "bytes");
    assert_eq!(inside["checked"], true);
    assert_eq!(desk.ok(&["inspect", "a.tokens", "--document", "1"]), "sings ü\n");
    assert!(desk.ok(&["inspect", "a.tokens"]).contains("has 7 to 8 tokens, 7.5 on average"));
}

#[test]
fn people_are_told_what_was_left_out() {
    let desk = Desk::new("told");
    desk.write("a.jsonl", "{\"text\": \"the owl\"}\n{\"body\": \"x\"}\n{\"text\": \"\"}\n");
    let told = desk.ok(&["prepare", "a.jsonl", "--out", "a.tokens"]);
    for line in [
        "a.tokens: 7 tokens in 1 documents",
        "1 rows without text",
        "a.jsonl:2: no field \"text\"; fields are: body",
    ] {
        assert!(told.contains(line), "{told}");
    }
}

#[test]
fn text_is_split_and_comes_through_a_pipe() {
    let desk = Desk::new("pipe");
    let arguments =
        ["prepare", "-", "--format", "text", "--split-on", "\\n\\n", "--out", "p.tokens"];
    let mut command = desk.command(&arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\n\ntwo\nlines\n\nthree\n").unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(desk.json(&["inspect", "p.tokens"])["documents"], 3);
    assert_eq!(desk.ok(&["inspect", "p.tokens", "--document", "1"]), "two\nlines\n");
}

#[test]
fn threads_do_not_show_in_the_output() {
    let desk = Desk::new("threads");
    let text: String =
        (0..20_000).map(|i| format!("line {i}\n{}", if i % 9 == 0 { "\n" } else { "" })).collect();
    desk.write("a.txt", &text);
    let files = ["1", "2", "5"].map(|threads| {
        let out = format!("{threads}.tokens");
        desk.ok(&["prepare", "a.txt", "--cut", "4K", "--threads", threads, "--out", &out]);
        std::fs::read(desk.0.join(out)).unwrap()
    });
    assert!(files[0].len() > 2 * text.len());
    assert!(files[0] == files[1] && files[1] == files[2], "the files differ");
}

/// A prepare that is killed in the middle leaves nothing under the final name, and the next one removes
/// what it left beside it.
#[test]
fn a_killed_prepare_leaves_no_half_file() {
    let desk = Desk::new("killed");
    let mut command = desk.command(&["prepare", "-", "--format", "text", "--out", "k.tokens"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    // More than pipes, buffers and batches hold: when it is all written, a part of it is in the file.
    let lines = "some text on a line\n".repeat(1000);
    (0..1000).for_each(|_| input.write_all(lines.as_bytes()).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!exists(&desk, "k.tokens"));
    let partial = format!(".k.tokens.partial-{}", child.id());
    assert!(exists(&desk, &partial), "it was killed while it wrote");

    desk.write("a.txt", "text");
    desk.ok(&["prepare", "a.txt", "--out", "k.tokens"]);
    assert!(exists(&desk, "k.tokens") && !exists(&desk, &partial));
}

#[test]
fn damage_is_found() {
    let desk = Desk::new("damage");
    desk.write("a.txt", "some text of many words");
    desk.ok(&["prepare", "a.txt", "--out", "a.tokens"]);
    let mut bytes = std::fs::read(desk.0.join("a.tokens")).unwrap();
    bytes[200] ^= 1;
    desk.write("changed.tokens", &bytes);
    desk.ok(&["inspect", "changed.tokens"]);
    assert!(
        desk.fails(&["inspect", "changed.tokens", "--check"]).contains("the tokens are corrupt")
    );
    desk.write("cut.tokens", &bytes[..bytes.len() - 1]);
    assert!(desk.fails(&["inspect", "cut.tokens"]).contains("truncated"));
    assert!(desk.fails(&["inspect", "a.txt"]).contains("not a token file"));
}

#[test]
fn mistakes_are_told_with_the_way_out() {
    let desk = Desk::new("mistakes");
    desk.write("a.txt", "text");
    desk.write("a.jsonl", "{\"content\": \"x\"}\n".repeat(10));
    desk.write("old.tokens", "mine");
    for (arguments, hint) in [
        (&["prepare", "a.jsonl", "--out", "x.tokens", "--max-bad", "3"][..], "fields are: content"),
        (&["prepare", "a.jsonl", "--out", "x.tokens"], "no document in a.jsonl"),
        (&["prepare", "a.txt", "--out", "old.tokens"], "--force"),
        (&["prepare", "a.txt", "--out", "x.tokens", "--cut", "1G"], "at most 32M"),
        (
            &["prepare", "a.txt", "--out", "x.tokens", "--tokenizer", "none.json"],
            "none.json: No such file",
        ),
        (&["prepare", "-", "--out", "x.tokens"], "--format"),
        (&["inspect", "a.txt", "--document", "5"], "not a token file"),
    ] {
        let told = desk.fails(arguments);
        assert!(told.contains(hint), "{arguments:?}: {told}");
        assert!(!exists(&desk, "x.tokens"));
    }
}

#[test]
fn the_built_in_language_tells_its_floor() {
    let desk = Desk::new("grammar");
    let told = desk.json(&["inspect", "builtin:grammar", "--seq", "64"]);
    let (floor, rate) = (told["floor"].as_f64().unwrap(), told["rate"].as_f64().unwrap());
    assert!((0.5..0.6).contains(&floor) && (0.5..floor).contains(&rate), "{told}");
    assert_eq!(told["vocab"], 256);
    assert!(desk.ok(&["inspect", "builtin:grammar"]).contains("nats per token"));
}
