//! `lockstep train`, `generate` and `bench step` as their users run them: the real binary, small run files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lockstep_events::{StepReport, read};
use lockstep_plan::Plan;
use serde_json::Value;

/// A few thousand parameters on the built-in grammar. Tests add what they are about.
const SMALL: &str = r#"
name = "small"
[model]
preset = "gpt2-test"
[train]
steps = 10
global_batch = 8
micro_batch = 2
lr = 1e-2
warmup = 2
threads = 1
log_every = 1
eval_every = 5
eval_batches = 1
[checkpoint]
every = 4
keep = 2
"#;

/// A folder of its own for a test, and the program in it.
struct Desk(PathBuf);

struct Ran {
    ok: bool,
    out: String,
    err: String,
}

impl Desk {
    /// With `small.toml` in it.
    fn new(name: &str) -> Desk {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("train-{name}"));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("the target folder can be written");
        let desk = Desk(dir);
        desk.write("small.toml", SMALL);
        desk
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).expect("the test's folder can be written");
    }

    fn run(&self, words: &str) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        let Output { status, stdout, stderr } = command
            .args(words.split_whitespace())
            .current_dir(&self.0)
            .output()
            .expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        Ran { ok: status.success(), out: text(stdout), err: text(stderr) }
    }

    /// What the program prints when all is well.
    #[track_caller]
    fn done(&self, words: &str) -> String {
        let ran = self.run(words);
        assert!(ran.ok, "{words}:\n{}{}", ran.out, ran.err);
        ran.out
    }

    /// It fails, and says all of this.
    #[track_caller]
    fn refused(&self, words: &str, hints: &[&str]) {
        let ran = self.run(words);
        assert!(!ran.ok, "{words}:\n{}", ran.out);
        for hint in hints {
            assert!(ran.err.contains(hint), "{words}: no {hint:?} in:\n{}", ran.err);
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    #[track_caller]
    fn has(&self, name: &str) {
        let size = fs::metadata(self.path(name)).map(|file| file.len());
        assert!(size.as_ref().is_ok_and(|size| *size > 0), "{name}: {size:?}");
    }

    /// The names in a folder, in order.
    #[track_caller]
    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(folder)).expect("a folder").flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    }

    #[track_caller]
    fn metrics(&self, run: &str) -> Vec<StepReport> {
        read(&self.path(run).join("metrics.jsonl")).expect("whole lines")
    }

    /// The loss of each step, in the order of the file.
    #[track_caller]
    fn losses(&self, run: &str) -> Vec<(usize, f64)> {
        let metrics = self.metrics(run);
        metrics.iter().filter_map(|line| Some((line.step, line.loss?))).collect()
    }

    #[track_caller]
    fn plan(&self, run: &str) -> Plan {
        let text = fs::read_to_string(self.path(run).join("plan.json")).expect("a plan");
        serde_json::from_str(&text).expect("a plan")
    }
}

#[track_caller]
fn alike(what: &str, one: &[(usize, f64)], other: &[(usize, f64)]) {
    assert_eq!(one.len(), other.len(), "{what}");
    for ((step, one), (other_step, other)) in one.iter().zip(other) {
        assert_eq!(step, other_step, "{what}");
        assert!((one / other - 1.0).abs() < 2e-5, "{what}, step {step}: {one} and {other}");
    }
}

#[test]
fn ranks_and_engines_train_alike_and_leave_their_files() {
    let desk = Desk::new("alike");
    let one = desk.done("train small.toml --set name=one");
    let losses = desk.losses("runs/one");
    assert_eq!(
        losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
    assert!(losses[9].1 < 0.9 * losses[0].1, "it learns: {losses:?}");
    let evaluated = |run: &str| -> Vec<(usize, f64)> {
        desk.metrics(run).iter().filter_map(|line| Some((line.step, line.eval_loss?))).collect()
    };
    assert_eq!(evaluated("runs/one").len(), 2);
    for said in
        ["1 rank(s)", "true entropy", "step 10/10 | loss", "above the entropy", "in runs/one"]
    {
        assert!(one.contains(said), "no {said:?} in:\n{one}");
    }

    let program = env!("CARGO_BIN_EXE_lockstep");
    for (name, words) in [
        ("shm", "train small.toml --ranks 2"),
        ("tcp", "train small.toml --ranks 2 --engine tcp"),
        ("threads", "train small.toml --ranks 2 --engine threads"),
        ("launched", &format!("launch --nproc-per-node 2 -- {program} train small.toml")),
    ] {
        let said = desk.done(&format!("{words} --set name={name}"));
        let run = format!("runs/{name}");
        alike(name, &desk.losses(&run), &losses);
        alike(name, &evaluated(&run), &evaluated("runs/one"));
        // One voice, whatever the number of ranks.
        assert_eq!(said.matches("step 10/10 | loss").count(), 1, "{said}");
        assert_eq!((desk.plan(&run).ranks, desk.plan(&run).layout.data), (2, 2));
        let kept = ["step-00000008", "step-00000010"];
        assert_eq!(desk.names(&format!("{run}/checkpoints")), kept, "{name}");
        for file in ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"] {
            desk.has(&format!("{run}/checkpoints/{}/{file}", kept[1]));
        }
        let events = desk.names(&format!("{run}/tensorboard"));
        assert!(events.len() == 1 && events[0].contains("tfevents"), "{events:?}");
        desk.has(&format!("{run}/tensorboard/{}", events[0]));
    }
    for run in ["shm", "tcp"] {
        assert_eq!(desk.names(&format!("runs/{run}/logs")), ["rank-0.log", "rank-1.log"]);
        desk.has(&format!("runs/{run}/logs/rank-0.log"));
    }
}

#[test]
fn a_run_of_the_same_name_is_kept_aside() {
    let desk = Desk::new("again");
    for (steps, words) in [(2, ""), (3, "--ranks 2"), (4, "")] {
        desk.done(&format!("train small.toml {words} --set train.steps={steps}"));
    }
    assert_eq!(desk.names("runs"), ["small", "small.1", "small.2"]);
    let steps = |run: &str| desk.losses(&format!("runs/{run}")).len();
    assert_eq!([steps("small.1"), steps("small.2"), steps("small")], [2, 3, 4]);
    let ran = desk.run("train small.toml --set train.steps=1 --set train.warmup=0");
    assert!(
        ran.ok && ran.err.contains("the run that was here before is now runs/small.3"),
        "{}",
        ran.err
    );

    // What a run starts from is not moved away under it.
    desk.refused("train small.toml --from runs/small", &["another name", "--set name="]);
    desk.has("runs/small/metrics.jsonl");
}

#[test]
fn a_resumed_run_goes_on_as_if_it_had_not_stopped() {
    let desk = Desk::new("resumed");
    let constant = "--ranks 2 --set train.schedule=constant";
    desk.done(&format!("train small.toml {constant} --set name=whole"));
    desk.done(&format!("train small.toml {constant} --set train.steps=6"));
    desk.done(&format!("train small.toml {constant} --resume"));
    assert_eq!(desk.losses("runs/small"), desk.losses("runs/whole"), "to the bit");
    assert_eq!(desk.names("runs"), ["small", "whole"], "nothing was put aside");

    // On another number of ranks too, up to rounding.
    desk.done(
        "train small.toml --set train.schedule=constant --set name=turned --set train.steps=6",
    );
    desk.done(
        "train small.toml --ranks 2 --set train.schedule=constant --set name=turned --resume",
    );
    alike("1 rank, then 2", &desk.losses("runs/turned"), &desk.losses("runs/whole"));
    desk.refused("train small.toml --resume --set name=never", &["no checkpoint in runs/never"]);
}

#[test]
fn values_are_laid_over_the_run_file() {
    let desk = Desk::new("set");
    desk.done(
        "train small.toml --set name=other --set train.steps=3 --set train.steps=2 --set model.preset=llama-test \
         --set precision.compute=bf16 --set layout.recompute=full",
    );
    assert_eq!(desk.losses("runs/other").len(), 2, "the last one counts");
    let plan = desk.plan("runs/other");
    assert_eq!((plan.train.steps, plan.model.kv_heads, plan.train.global_batch), (2, 2, 8));

    let printed = desk.done("train small.toml --dry-run --ranks 2 --set data.held_out=0.25");
    let plan: Plan = serde_json::from_str(&printed).expect("a plan");
    assert_eq!((plan.train.accumulation, plan.data.held_out), (2, 0.25));
    assert_eq!(desk.names("runs"), ["other"], "a dry run leaves nothing");
}

#[test]
fn all_mistakes_are_told_at_once_with_the_way_out() {
    let desk = Desk::new("mistakes");
    desk.write(
        "wrong.toml",
        "[model]\npreset = \"gpt2-test\"\nheads = 3\n[data]\nsource = \"nowhere.tokens\"\n[train]\nstpes = 5\n\
         global_batch = 7\n[layout]\ndata = 2\nzero = 4\n",
    );
    let all = [
        "5 mistakes",
        "data.source=\"nowhere.tokens\"",
        "model.heads (line 3): heads=3 does not divide dim=16; try 2 or 4",
        "train.stpes (line 7): no such key; did you mean train.steps?",
        "global_batch=7 is not a multiple of data=2",
        "layout.zero (line 11): zero=4 cannot be; ZeRO has the stages 0, 1, 2 and 3",
    ];
    desk.refused("train wrong.toml", &all);
    for (words, hints) in [
        ("train absent.toml", vec!["cannot read absent.toml"]),
        ("train small.toml --set train.lr=fast", vec!["train.lr (--set)", "a number such as"]),
        ("train small.toml --set trian.lr=1", vec!["did you mean [train]?"]),
        (
            "train small.toml --set data.source=nowhere",
            vec!["data.source=\"nowhere\"", "No such file"],
        ),
        (
            "train small.toml --set data.source=nowhere --set layout.tensor=2",
            vec!["small.toml: data.source=\"nowhere\""], // and no other mistake
        ),
        (
            "train small.toml --ranks 3",
            vec!["global_batch=8 is not a multiple of data=3; try 6 or 12"],
        ),
        ("train small.toml --ranks 0", vec!["at least one rank"]),
        (
            "train small.toml --ranks 2 --set layout.data=4",
            vec!["data=4 takes 4 ranks, but 2 ranks are started"],
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
    desk.refused(words, &["rank ", "is not a finite number; the step was not taken", "lower lr"]);
}

#[test]
fn text_follows_from_the_seed() {
    let desk = Desk::new("text");
    let said = desk.done("train small.toml --set train.sample=the --set train.sample_tokens=20");
    assert!(said.contains("\nthe"), "{said}");

    let json = |words: &str| -> Value {
        let said = desk.done(&format!("generate runs/small --tokens 40 --json {words}"));
        serde_json::from_str(&said).expect("one object")
    };
    let text = |words: &str| json(words)["text"].as_str().expect("text").to_string();
    let first = json("--prompt the --seed 3");
    assert_eq!((first["prompt"].as_str(), first["step"].as_u64()), (Some("the"), Some(10)));
    assert_eq!(text("--prompt the --seed 3"), first["text"], "the same seed");
    assert_ne!(text("--prompt the --seed 4"), first["text"], "another one");
    assert_eq!(text("--temperature 0 --seed 1"), text("--temperature 0 --seed 2 --threads 2"));
    assert_eq!(text("--temperature 0"), text("--top-k 1"), "the likeliest of one");
    // Longer than the model's sequences of 16, and from an older checkpoint.
    assert!(text("--temperature 0").len() >= 30);
    let older = desk.done("generate runs/small/checkpoints/step-00000008 --tokens 5 --json");
    assert_eq!(serde_json::from_str::<Value>(&older).expect("one object")["step"], 8);
    // As text: the prompt, and what follows.
    let shown = desk.done("generate runs/small --tokens 40 --prompt the --seed 3");
    assert_eq!(shown, format!("the{}\n", first["text"].as_str().expect("text")));

    for (words, hint) in
        [("--temperature -1", "0 or more"), ("--top-p 2", "at most 1"), ("--top-k 0", "1 at least")]
    {
        desk.refused(&format!("generate runs/small {words}"), &[hint]);
    }
}

/// However the model lies on the ranks, it is the same model, and text is made from all of it.
#[test]
fn text_at_the_end_of_a_run_is_its_checkpoints() {
    let desk = Desk::new("layouts");
    let sample = "--set train.steps=4 --set train.sample=the --set train.sample_tokens=20";
    let mut first = None;
    for layout in ["data=1", "data=2", "zero=3", "tensor=2", "pipe=2"] {
        let ranks = if layout == "data=1" { 1 } else { 2 };
        let words = format!("train small.toml {sample} --ranks {ranks} --set layout.{layout}");
        let said = desk.done(&words);
        let losses = desk.losses("runs/small");
        alike(layout, &losses, first.get_or_insert(losses.clone()));

        let how = "--temperature 0.8 --top-p 0.95 --seed 1 --threads 1 --json";
        let again = desk.done(&format!("generate runs/small --prompt the --tokens 20 {how}"));
        let again: Value = serde_json::from_str(&again).expect("one object");
        let text = again["text"].as_str().expect("text");
        assert!(!text.is_empty() && said.contains(&format!("\nthe{text}\n")), "{layout}: {said}");
    }
}

#[test]
fn weights_go_out_and_come_back_to_be_trained_on() {
    let desk = Desk::new("from");
    desk.done("train small.toml");
    desk.done("export runs/small --to folder");
    desk.done("import folder --out runs/back");
    // The same weights, by either way; and better than none.
    desk.done("train small.toml --set train.steps=3 --set name=direct --from runs/small");
    desk.done("train small.toml --set train.steps=3 --set name=around --from runs/back --ranks 2 --set model.dropout=0");
    alike("through a folder", &desk.losses("runs/around"), &desk.losses("runs/direct"));
    let (fresh, trained) = (desk.losses("runs/small")[0].1, desk.losses("runs/direct")[0].1);
    assert!(trained < 0.9 * fresh, "{trained} after {fresh}");
    // What only matters in training may change.
    desk.done("train small.toml --set train.steps=2 --set name=dropped --from runs/back --set model.dropout=0.1");

    // A folder that transformers wrote, with 97 tokens: too few for the grammar's bytes.
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/pytorch/gpt2");
    desk.done(&format!("import {} --out runs/theirs", fixture.display()));
    desk.write(
        "theirs.toml",
        "[model]\nfamily = \"gpt2\"\ndim = 32\nlayers = 3\nheads = 4\nseq = 24\nvocab = 97\n[train]\nsteps = 2\n",
    );
    let few = ["model.vocab (line 7): vocab=97 is less than the 256 of the data"];
    desk.refused("train theirs.toml --from runs/theirs --set name=tuned", &few);
    let other = ["holds another model than the run file describes: vocab is 97 there and 256 here"];
    desk.refused(
        "train theirs.toml --from runs/theirs --set name=tuned --set model.vocab=256",
        &other,
    );
}

#[test]
fn own_text_is_trained_on() {
    let desk = Desk::new("own");
    let sentence = |i: usize| format!("the {i}. owl sings, and the {}. fox listens.\n", 7 * i % 10);
    let text: Vec<String> = (0..200).map(sentence).collect();
    desk.write("songs.txt", &text.join("\n"));
    desk.done("data prepare songs.txt --out songs.tokens --cut 100");
    let words = "train small.toml --ranks 2 --set data.source=songs.tokens --set train.steps=30";
    let said = desk.done(words);
    assert!(!said.contains("entropy"), "nobody knows it: {said}");
    let losses = desk.losses("runs/small");
    assert!(losses[29].1 < 0.7 * losses[0].1, "{losses:?}");
    assert_eq!(
        (desk.plan("runs/small").model.vocab, desk.plan("runs/small").data.held_out),
        (257, 0.05)
    );
    assert!(desk.metrics("runs/small").iter().any(|line| line.eval_loss.is_some()));
    desk.done("generate runs/small --prompt owl --tokens 10");
    // What the plan says is what was held out.
    desk.done(&format!("{words} --set name=said --set data.held_out=0.05"));
    assert_eq!(desk.losses("runs/said"), losses);
    desk.done(&format!("{words} --set name=less --set data.held_out=0.01"));
    assert_ne!(desk.losses("runs/less"), losses);

    // One document cannot be both trained on and held out.
    desk.done("data prepare songs.txt --out one.tokens --cut 0");
    desk.refused(
        "train small.toml --set data.source=one.tokens",
        &["1 documents would be held out", "held_out = 0"],
    );
    let words =
        "train small.toml --set data.source=one.tokens --set data.held_out=0 --set train.steps=2";
    desk.refused(words, &["train.eval_every", "data.held_out=0 keeps nothing to evaluate on"]);
}

#[test]
fn a_measured_step_is_told_with_its_memory_as_planned() {
    let desk = Desk::new("step");
    for words in
        ["--ranks 1", "--ranks 2 --dtype bf16", "--ranks 2 --engine threads --recompute full"]
    {
        let said = desk.done(&format!("bench step --config small.toml --steps 2 --json {words}"));
        let record: Value = serde_json::from_str(&said).expect("one object");
        assert_eq!(
            (record["config"].as_str(), record["steps"].as_u64()),
            (Some("small.toml"), Some(2))
        );
        assert_eq!(record["ranks"].to_string(), words[8..9], "{record}");
        let numbers = [
            "step_ms",
            "tokens_per_s",
            "gflops",
            "gemm_peak_gflops",
            "mfu",
            "comm_exposed",
            "peak_bytes",
        ];
        for name in numbers {
            assert!(record[name].as_f64().is_some_and(|number| number > 0.0), "{name}: {record}");
        }
        let memory = record["memory"].as_array().expect("a list");
        assert_eq!(memory.len(), 5, "{record}");
        for held in memory {
            match held["tag"].as_str().expect("a name") {
                "parameters" | "gradients" | "optimizer" => {
                    assert_eq!(held["planned"], held["peak"], "{words}")
                }
                "activations" => {
                    let (planned, peak) = (held["planned"].as_f64(), held["peak"].as_f64());
                    let off = peak.expect("bytes") / planned.expect("bytes") - 1.0;
                    assert!(off.abs() < 0.03, "{words}: {held}");
                }
                _ => {
                    assert!(held["planned"].is_null() && held["peak"].as_u64() > Some(0), "{held}")
                }
            }
        }
    }
    let table = desk.done("bench step --config small.toml --steps 1");
    for said in ["tokens/s", "GFLOP/s", "matmul", "memory (MiB)", "parameters"] {
        assert!(table.contains(said), "no {said:?} in:\n{table}");
    }
}

#[test]
fn a_measured_step_takes_any_layout() {
    let desk = Desk::new("step-layouts");
    for (words, ranks) in [
        ("--ranks 2 --set layout.zero=3", 2),
        ("--set layout.tensor=2 --engine threads", 2),
        ("--ranks 4 --set layout.tensor=2 --engine threads", 4),
    ] {
        let said = desk.done(&format!("bench step --config small.toml --steps 1 --json {words}"));
        let record: Value = serde_json::from_str(&said).expect("one object");
        assert_eq!(record["ranks"].as_u64(), Some(ranks), "{words}: {record}");
        // Half of the moments of one rank, whichever axis it is that cuts them.
        let optimizer = |record: &Value| {
            let memory = record["memory"].as_array().expect("a list");
            let held = memory.iter().find(|held| held["tag"] == "optimizer").expect("it is told");
            held["peak"].as_f64().expect("bytes")
        };
        let alone = desk.done("bench step --config small.toml --steps 1 --json --ranks 1");
        let alone: Value = serde_json::from_str(&alone).expect("one object");
        let share = optimizer(&record) / optimizer(&alone);
        assert!((0.5..0.6).contains(&share), "{words}: {share}");
    }
    desk.refused(
        "bench step --config tiny --ranks 2 --set layout.tensor=4",
        &["tensor=4 takes 4 ranks", "2 ranks are started"],
    );
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
            "damaged samples, and data.max_corrupt allows 0",
            "words.tokens, document",
            "bytes 49344 to 65728",
        ],
    );
}
