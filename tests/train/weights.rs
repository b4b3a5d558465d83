//! Uses of trained weights: generation, export and import, and further training.

use std::path::Path;

use serde_json::Value;

use crate::workspace::{Workspace, assert_same_losses};

#[test]
fn generation_is_determined_by_the_seed() {
    let workspace = Workspace::new("text");
    let output =
        workspace.output("train small.toml --set train.sample=the --set train.sample_tokens=20");
    assert!(output.contains("\nthe"), "{output}");

    let json = |args: &str| -> Value {
        let output = workspace.output(&format!("generate runs/small --tokens 40 --json {args}"));
        serde_json::from_str(&output).expect("one object")
    };
    let text = |args: &str| json(args)["text"].as_str().expect("text").to_string();
    let first = json("--prompt the --seed 3");
    assert_eq!((first["prompt"].as_str(), first["step"].as_u64()), (Some("the"), Some(10)));
    assert_eq!(text("--prompt the --seed 3"), first["text"], "the same seed");
    assert_ne!(text("--prompt the --seed 4"), first["text"], "another seed");
    assert_eq!(text("--temperature 0 --seed 1"), text("--temperature 0 --seed 2 --threads 2"));
    assert_eq!(text("--temperature 0"), text("--top-k 1"), "only one candidate");
    // Longer than the model's sequence length of 16.
    assert!(text("--temperature 0").len() >= 30);
    let older = workspace.output("generate runs/small/checkpoints/step-00000008 --tokens 5 --json");
    assert_eq!(serde_json::from_str::<Value>(&older).expect("one object")["step"], 8);
    // Without --json: the prompt and its continuation.
    let shown = workspace.output("generate runs/small --tokens 40 --prompt the --seed 3");
    assert_eq!(shown, format!("the{}\n", first["text"].as_str().expect("text")));

    for (args, part) in [
        ("--temperature -1", "--temperature must be at least 0 (got -1)"),
        ("--top-p 2", "--top-p must be greater than 0 and at most 1 (got 2)"),
        ("--top-k 0", "--top-k must be at least 1 (got 0)"),
        ("--threads 0", "--threads must be at least 1 (got 0)"),
    ] {
        workspace.assert_fails(&format!("generate runs/small {args}"), &[part]);
    }
}

/// The sample at the end of a run equals the text generated from its checkpoint, on every layout.
#[test]
fn sample_equals_generation_from_the_checkpoint() {
    let workspace = Workspace::new("layouts");
    let sample = "--set train.steps=4 --set train.sample=the --set train.sample_tokens=20";
    let mut first = None;
    for layout in ["data=1", "data=2", "zero=3", "tensor=2", "pipe=2"] {
        let ranks = if layout == "data=1" { 1 } else { 2 };
        let args = format!("train small.toml {sample} --ranks {ranks} --set layout.{layout}");
        let output = workspace.output(&args);
        let losses = workspace.losses("runs/small");
        assert_same_losses(layout, &losses, first.get_or_insert(losses.clone()));

        let options = "--temperature 0.8 --top-p 0.95 --seed 1 --threads 1 --json";
        let generated =
            workspace.output(&format!("generate runs/small --prompt the --tokens 20 {options}"));
        let generated: Value = serde_json::from_str(&generated).expect("one object");
        let text = generated["text"].as_str().expect("text");
        assert!(
            !text.is_empty() && output.contains(&format!("\nthe{text}\n")),
            "{layout}: {output}"
        );
    }
}

#[test]
fn exported_weights_can_be_imported_and_trained() {
    let workspace = Workspace::new("from");
    workspace.output("train small.toml");
    workspace.output("export runs/small --to folder");
    workspace.output("import folder --out runs/back");
    // Training from the run and from the imported weights is the same, and better than from scratch.
    workspace.output("train small.toml --set train.steps=3 --set name=direct --from runs/small");
    workspace.output("train small.toml --set train.steps=3 --set name=around --from runs/back --ranks 2 --set model.dropout=0");
    assert_same_losses(
        "through a Hugging Face folder",
        &workspace.losses("runs/around"),
        &workspace.losses("runs/direct"),
    );
    let (fresh, trained) =
        (workspace.losses("runs/small")[0].1, workspace.losses("runs/direct")[0].1);
    assert!(trained < 0.9 * fresh, "{trained} after {fresh}");
    // Dropout is not a property of the weights.
    workspace.output("train small.toml --set train.steps=2 --set name=dropped --from runs/back --set model.dropout=0.1");

    // A folder written by transformers, with a vocabulary of 97: too small for the bytes of the grammar.
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/pytorch/gpt2");
    workspace.output(&format!("import {} --out runs/theirs", fixture.display()));
    workspace.write(
        "theirs.toml",
        "[model]\nfamily = \"gpt2\"\ndim = 32\nlayers = 3\nheads = 4\nseq = 24\nvocab = 97\n[train]\nsteps = 2\n",
    );
    let few = ["model.vocab (line 7): vocab=97 is less than the vocabulary of the data, 256"];
    workspace.assert_fails("train theirs.toml --from runs/theirs --set name=tuned", &few);
    let other = ["does not match the model of the run file: vocab is 97 in the checkpoint and 256"];
    workspace.assert_fails(
        "train theirs.toml --from runs/theirs --set name=tuned --set model.vocab=256",
        &other,
    );
}

/// An imported Mixtral has the loss terms of its config.json, which are not the defaults.
#[test]
fn training_from_an_imported_mixture_uses_its_loss_terms() {
    let workspace = Workspace::new("loss-terms");
    let train = "train small.toml --set model.preset=moe-test --set train.steps";
    workspace.output(&format!("{train}=2 --set name=base --set model.aux_loss=0.003"));
    workspace.output("export runs/base --to folder");
    workspace.output("import folder --out runs/back");
    let terms = |name: &str| {
        let moe = workspace.plan(&format!("runs/{name}")).model.moe.expect("experts");
        (moe.aux_loss, moe.z_loss)
    };
    workspace.output(&format!("{train}=2 --set name=tuned --from runs/back"));
    assert_eq!(terms("tuned"), (0.003, 0.0));
    // A resumed run continues with them.
    workspace.output(&format!("{train}=3 --set name=tuned --resume --ranks 2"));
    assert_eq!(terms("tuned"), (0.003, 0.0));
    workspace
        .output(&format!("{train}=2 --set name=typed --from runs/back --set model.z_loss=0.5"));
    assert_eq!(terms("typed"), (0.003, 0.5));
}
