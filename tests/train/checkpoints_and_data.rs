//! Models and tokenizers that come from a run's folder, and data that does not fit the model.

use std::fs;

use crate::workspace::{SMALL, Workspace};

/// `SMALL` without a section.
fn without_section(name: &str) -> String {
    let sections = SMALL.split("\n[").filter(|section| !section.starts_with(name));
    sections.collect::<Vec<_>>().join("\n[")
}

#[test]
fn a_run_from_a_checkpoint_needs_no_model_section() {
    let workspace = Workspace::new("no-model");
    workspace.output("train small.toml --set model.dim=24 --set model.heads=3 --set train.steps=2");
    workspace.write("tuned.toml", &without_section("model]").replace("small", "tuned"));
    let tuned = workspace.output("train tuned.toml --from runs/small --set train.steps=2");
    assert!(
        tuned.contains("loaded the weights of runs/small/checkpoints/step-00000002"),
        "{tuned}"
    );
    assert_eq!(workspace.plan("runs/tuned").model, workspace.plan("runs/small").model);
    // The run file has no model when the run is resumed either.
    let resumed = workspace.output("train tuned.toml --resume --set train.steps=4");
    assert!(resumed.contains("resumed from runs/tuned/checkpoints/step-00000002"), "{resumed}");
    assert_eq!(workspace.plan("runs/tuned").model, workspace.plan("runs/small").model);
}

/// A token file with three documents.
fn prepare(workspace: &Workspace) {
    workspace.write("text.jsonl", &"{\"text\": \"an owl sings in the night\"}\n".repeat(3));
    workspace.output("data prepare text.jsonl --out text.tokens");
}

const ON_TEXT: &str = "--set data.source=text.tokens --set data.held_out=0 --set train.eval_every=0 \
                       --set train.steps=2";

#[test]
fn generate_needs_only_the_run_folder() {
    let workspace = Workspace::new("only-the-run");
    prepare(&workspace);
    workspace.output(&format!("train small.toml {ON_TEXT}"));
    fs::remove_file(workspace.path("text.tokens")).unwrap();
    fs::rename(workspace.path("runs/small"), workspace.path("moved")).unwrap();
    for run in ["moved", "moved/checkpoints/step-00000002"] {
        let text = workspace.output(&format!("generate {run} --prompt owl --tokens 8"));
        assert!(text.starts_with("owl"), "{text}");
    }
    workspace.output("export moved --to exported");
    let read = |name: &str| fs::read(workspace.path(name)).unwrap();
    assert_eq!(read("exported/tokenizer.json"), read("moved/tokenizer.json"));
    let config: serde_json::Value = serde_json::from_slice(&read("exported/config.json")).unwrap();
    assert_eq!(config["eos_token_id"], 256);
}

#[test]
fn a_prompt_longer_than_the_context_is_not_cut_silently() {
    let workspace = Workspace::new("long-prompt");
    workspace.output("train small.toml --set train.steps=2");
    let prompt = "x".repeat(1 + workspace.plan("runs/small").model.seq);
    let run = workspace.run(&format!("generate runs/small --prompt {prompt} --tokens 1"));
    assert!(run.ok && run.err.contains("more than the model's context of"), "{}", run.err);
}

#[test]
fn data_that_does_not_fit_the_model_is_reported() {
    let workspace = Workspace::new("unfit-data");
    prepare(&workspace);
    let run = workspace
        .run(&format!("train small.toml {ON_TEXT} --set model.seq=128 --set model.vocab=50257"));
    assert!(run.ok, "{}", run.err);
    for says in [
        "the training data has 78 tokens, less than one sample of 129",
        "a vocabulary of 50,257, but the data only 257 tokens",
        "set model.vocab = 257",
    ] {
        assert_eq!(run.err.matches(says).count(), 1, "{says}: {}", run.err);
    }
    assert!(run.out.contains("data: 78 tokens per epoch; 2 steps are"), "{}", run.out);
    assert!(run.out.contains("step 2/2 | epoch "), "{}", run.out);
    assert!(!run.out.contains("eval loss"), "{}", run.out);
}

#[test]
fn an_engine_that_was_not_built_names_its_feature() {
    if cfg!(feature = "mpi") {
        return;
    }
    let workspace = Workspace::new("no-mpi");
    let run = workspace.run("train small.toml --engine mpi");
    assert!(!run.ok && run.err.contains("build with --features mpi"), "{}", run.err);
}

#[test]
fn ranks_of_mpirun_say_that_they_do_not_use_mpi() {
    let workspace = Workspace::new("mpirun");
    let variables = [
        ("OMPI_COMM_WORLD_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "1"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    ];
    let run = workspace.run_with("train small.toml --set train.steps=2", &variables);
    assert!(run.ok && run.err.contains("with the shm engine, not with MPI"), "{}", run.err);
}
