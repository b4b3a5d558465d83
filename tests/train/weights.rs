//! What can be done with weights: text from them, folders for others, and training that starts from them.

use std::path::Path;

use serde_json::Value;

use crate::desk::{Desk, alike};

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
    let other = ["does not match the model of the run file: vocab is 97 in the checkpoint and 256"];
    desk.refused(
        "train theirs.toml --from runs/theirs --set name=tuned --set model.vocab=256",
        &other,
    );
}
