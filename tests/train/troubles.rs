//! What goes wrong is told, with the way out.

use std::fs;

use crate::desk::{Desk, SMALL};

#[test]
fn all_mistakes_are_told_at_once_with_the_way_out() {
    let desk = Desk::new("mistakes");
    desk.write(
        "wrong.toml",
        "[model]\npreset = \"gpt2-test\"\nheads = 3\n[data]\nsource = \"nowhere.tokens\"\n[train]\nstpes = 5\n\
         global_batch = 7\n[layout]\ndata = 2\nzero = 4\n",
    );
    let all = [
        "5 errors",
        "data.source=\"nowhere.tokens\"",
        "model.heads (line 3): heads=3 does not divide dim=16; use 2 or 4",
        "train.stpes (line 7): unknown key; did you mean train.steps?",
        "global_batch=7 is not a multiple of data=2",
        "layout.zero (line 11): zero must be 0, 1, 2 or 3 (got 4)",
    ];
    desk.refused("train wrong.toml", &all);
    for (words, hints) in [
        ("train absent.toml", vec!["cannot read absent.toml"]),
        (
            "train small.toml --set train.lr=fast",
            vec!["train.lr (--set)", "lr must be a finite number"],
        ),
        ("train small.toml --set trian.lr=1", vec!["did you mean [train]?"]),
        (
            "train small.toml --set data.source=nowhere",
            vec!["data.source=\"nowhere\"", "No such file"],
        ),
        (
            "train small.toml --set data.source=nowhere --set layout.tensor=2",
            vec!["small.toml: data.source=\"nowhere\""], // and no other error
        ),
        (
            "train small.toml --ranks 3",
            vec!["global_batch=8 is not a multiple of data=3; use 6 or 12"],
        ),
        ("train small.toml --ranks 0", vec!["at least one rank"]),
        (
            "train small.toml --ranks 2 --set layout.data=4",
            vec!["data=4 needs 4 ranks, but 2 ranks were started"],
        ),
        ("train small.toml --from nowhere", vec!["no checkpoint in nowhere"]),
        ("generate nowhere", vec!["no checkpoint in nowhere"]),
        ("bench step --config nothing", vec!["tiny, small, gpt2, or the path of a run file"]),
    ] {
        desk.refused(words, &hints);
    }
    assert!(!desk.path("runs/wrong").exists(), "nothing was begun");
}

#[test]
fn a_number_that_is_none_ends_the_run_and_is_named() {
    let desk = Desk::new("nan");
    let words =
        "train small.toml --ranks 2 --set train.lr=1e30 --set train.warmup=0 --set train.clip=0";
    desk.refused(words, &["rank ", "is not finite; the step was not applied", "lower train.lr"]);
}

/// What a run that came out as no number tells to type does what it says.
#[test]
fn a_nan_tells_the_command_that_replays_it() {
    let desk = Desk::new("replay");
    let wild = "--set train.lr=1e30 --set train.min_lr=0 --set train.warmup=0 --set train.clip=0";
    let ran = desk.run(&format!("train small.toml --ranks 2 {wild}"));
    assert!(!ran.ok, "{}", ran.out);
    let command = ran.err.lines().find(|line| line.contains("--replay-step"));
    let command = command.unwrap_or_else(|| panic!("no command in:\n{}", ran.err));
    let words = command.split_once("lockstep ").expect("the program's name").1;
    let before = desk.names("runs/small");
    assert!(before.contains(&"failed".to_string()), "{before:?}");
    let said = desk.done(words);
    for hint in [
        "from runs/small/failed/checkpoints/step-",
        "is not finite again, with the same bits twice",
        "made by the built-in grammar",
    ] {
        assert!(said.contains(hint), "no {hint:?} in:\n{said}");
    }
    assert_eq!(desk.names("runs/small"), before, "nothing was written");

    desk.done("train small.toml --set name=good --set checkpoint.keep=0");
    let said = desk.done("train small.toml --set name=good --replay-step 6");
    for hint in
        ["from runs/good/checkpoints/step-00000004", "step 6 is finite", "as the run wrote it down"]
    {
        assert!(said.contains(hint), "no {hint:?} in:\n{said}");
    }
    desk.refused("train small.toml --replay-step 11", &["the run has steps 1 to 10"]);
}

#[test]
fn a_rotten_spot_costs_samples_and_too_many_end_the_run() {
    let desk = Desk::new("rotten");
    let text: String = (0..20_000).map(|word| format!("{word} ")).collect();
    desk.write("words.txt", &text);
    desk.done("data prepare words.txt --out words.tokens");
    let mut bytes = fs::read(desk.path("words.tokens")).expect("it was made");
    bytes[60_000] ^= 1;
    fs::write(desk.path("words.tokens"), bytes).expect("the test's folder can be written");
    desk.refused(
        "data inspect words.tokens --check",
        &["the tokens changed", "chunks, the first at byte"],
    );

    // Nothing is held out, so there is nothing to evaluate on.
    desk.write("rotten.toml", &SMALL.replace("eval_every = 5\neval_batches = 1\n", ""));
    let words = "train rotten.toml --set data.source=words.tokens --set data.held_out=0";
    let counts = |name: &str| -> Vec<u64> {
        let metrics = desk.metrics(name);
        let counts = metrics.iter().filter_map(|line| line.more.get("corrupt_samples")?.as_u64());
        counts.collect()
    };
    desk.done(&format!("{words} --set name=one"));
    desk.done(&format!("{words} --set name=two --ranks 2"));
    let one = counts("runs/one");
    assert!(one.len() == 10 && one[9] > 0, "{one:?}");
    assert_eq!(counts("runs/two"), one, "all ranks count the same");
    desk.refused(
        &format!("{words} --set name=none --ranks 2 --set data.max_corrupt=0"),
        &[
            "corrupt samples, but data.max_corrupt = 0",
            "words.tokens, document",
            "bytes 49344 to 65728",
        ],
    );
}

#[test]
fn a_measured_machine_that_cannot_be_read_is_named_and_the_run_goes_on() {
    let desk = Desk::new("machine");
    fs::create_dir(desk.path("runs")).unwrap();
    desk.write("runs/machine.toml", "[shared.4]\nname = \"x\"\n");
    let told = desk.done("train small.toml");
    assert!(told.contains("runs/machine.toml: measured with 4 ranks, not 1"), "{told}");
    // One that was asked for is another matter.
    let asked = "train small.toml --set name=asked --cluster runs/machine.toml";
    desk.refused(asked, &["measured with 4 ranks, not 1"]);
}
