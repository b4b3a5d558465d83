//! Runs that finish, and the files they write.

use lockstep_plan::Plan;

use crate::workspace::{Workspace, assert_same_losses};

#[test]
fn ranks_and_engines_give_the_same_losses_and_files() {
    let workspace = Workspace::new("engines");
    let one = workspace.output("train small.toml --set name=one");
    let losses = workspace.losses("runs/one");
    assert_eq!(
        losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        (1..=10).collect::<Vec<_>>()
    );
    assert!(losses[9].1 < 0.9 * losses[0].1, "the loss falls: {losses:?}");
    let evaluated = |run: &str| -> Vec<(usize, f64)> {
        workspace
            .metrics(run)
            .iter()
            .filter_map(|line| Some((line.step, line.eval_loss?)))
            .collect()
    };
    assert_eq!(evaluated("runs/one").len(), 2);
    for part in [
        "1 rank(s)",
        "entropy of the data",
        "step 10/10 | loss",
        "above the entropy",
        "run folder: runs/one",
    ] {
        assert!(one.contains(part), "no {part:?} in:\n{one}");
    }

    let program = env!("CARGO_BIN_EXE_lockstep");
    for (name, args) in [
        ("shm", "train small.toml --ranks 2"),
        ("tcp", "train small.toml --ranks 2 --engine tcp"),
        ("threads", "train small.toml --ranks 2 --engine threads"),
        ("launched", &format!("launch --nproc-per-node 2 -- {program} train small.toml")),
    ] {
        let output = workspace.output(&format!("{args} --set name={name}"));
        let run = format!("runs/{name}");
        assert_same_losses(name, &workspace.losses(&run), &losses);
        assert_same_losses(name, &evaluated(&run), &evaluated("runs/one"));
        // Only rank 0 prints.
        assert_eq!(output.matches("step 10/10 | loss").count(), 1, "{output}");
        assert_eq!((workspace.plan(&run).ranks, workspace.plan(&run).layout.data), (2, 2));
        let kept = ["step-00000008", "step-00000010"];
        assert_eq!(workspace.names(&format!("{run}/checkpoints")), kept, "{name}");
        for file in ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"] {
            workspace.assert_file(&format!("{run}/checkpoints/{}/{file}", kept[1]));
        }
        let events = workspace.names(&format!("{run}/tensorboard"));
        assert!(events.len() == 1 && events[0].contains("tfevents"), "{events:?}");
        workspace.assert_file(&format!("{run}/tensorboard/{}", events[0]));
    }
    for run in ["shm", "tcp"] {
        assert_eq!(workspace.names(&format!("runs/{run}/logs")), ["rank-0.log", "rank-1.log"]);
        workspace.assert_file(&format!("runs/{run}/logs/rank-0.log"));
    }
}

#[test]
fn an_existing_run_is_renamed() {
    let workspace = Workspace::new("renamed");
    for (steps, args) in [(2, ""), (3, "--ranks 2"), (4, "")] {
        workspace.output(&format!("train small.toml {args} --set train.steps={steps}"));
    }
    assert_eq!(workspace.names("runs"), ["small", "small.1", "small.2"]);
    let steps = |run: &str| workspace.losses(&format!("runs/{run}")).len();
    assert_eq!([steps("small.1"), steps("small.2"), steps("small")], [2, 3, 4]);
    let finished = workspace.run("train small.toml --set train.steps=1 --set train.warmup=0");
    assert!(
        finished.ok && finished.err.contains("renamed the existing run to runs/small.3"),
        "{}",
        finished.err
    );

    // A run does not rename the folder that it starts from.
    workspace.assert_fails("train small.toml --from runs/small", &["another name", "--set name="]);
    workspace.assert_file("runs/small/metrics.jsonl");
}

#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    let workspace = Workspace::new("resumed");
    let constant = "--ranks 2 --set train.schedule=constant";
    workspace.output(&format!("train small.toml {constant} --set name=whole"));
    workspace.output(&format!("train small.toml {constant} --set train.steps=6"));
    workspace.output(&format!("train small.toml {constant} --resume"));
    assert_eq!(workspace.losses("runs/small"), workspace.losses("runs/whole"), "bit for bit");
    assert_eq!(workspace.names("runs"), ["small", "whole"], "no run was renamed");

    // On another number of ranks, up to rounding.
    workspace.output(
        "train small.toml --set train.schedule=constant --set name=turned --set train.steps=6",
    );
    workspace.output(
        "train small.toml --ranks 2 --set train.schedule=constant --set name=turned --resume",
    );
    assert_same_losses(
        "1 rank, then 2",
        &workspace.losses("runs/turned"),
        &workspace.losses("runs/whole"),
    );
    workspace.assert_fails(
        "train small.toml --resume --set name=never",
        &["no checkpoint in runs/never"],
    );
}

#[test]
fn set_overrides_the_run_file() {
    let workspace = Workspace::new("set");
    workspace.output(
        "train small.toml --set name=other --set train.steps=3 --set train.steps=2 --set model.preset=llama-test \
         --set precision.compute=bf16 --set layout.recompute=full",
    );
    assert_eq!(workspace.losses("runs/other").len(), 2, "the last --set wins");
    let plan = workspace.plan("runs/other");
    assert_eq!((plan.train.steps, plan.model.kv_heads, plan.train.global_batch), (2, 2, 8));

    let printed = workspace.output("train small.toml --dry-run --ranks 2 --set data.held_out=0.25");
    let plan: Plan = serde_json::from_str(&printed).expect("a valid plan");
    assert_eq!((plan.train.accumulation, plan.data.held_out), (2, 0.25));
    assert_eq!(workspace.names("runs"), ["other"], "a dry run writes nothing");
}

#[test]
fn trains_on_prepared_text() {
    let workspace = Workspace::new("text-data");
    let sentence = |i: usize| format!("the {i}. owl sings, and the {}. fox listens.\n", 7 * i % 10);
    let text: Vec<String> = (0..200).map(sentence).collect();
    workspace.write("songs.txt", &text.join("\n"));
    workspace.output("data prepare songs.txt --out songs.tokens --cut 100");
    let args = "train small.toml --ranks 2 --set data.source=songs.tokens --set train.steps=30";
    let output = workspace.output(args);
    assert!(!output.contains("entropy"), "it is unknown: {output}");
    let losses = workspace.losses("runs/small");
    assert!(losses[29].1 < 0.7 * losses[0].1, "{losses:?}");
    assert_eq!(
        (workspace.plan("runs/small").model.vocab, workspace.plan("runs/small").data.held_out),
        (257, 0.05)
    );
    assert!(workspace.metrics("runs/small").iter().any(|line| line.eval_loss.is_some()));
    workspace.output("generate runs/small --prompt owl --tokens 10");
    // The default held-out fraction is the one in the plan.
    workspace.output(&format!("{args} --set name=explicit --set data.held_out=0.05"));
    assert_eq!(workspace.losses("runs/explicit"), losses);
    workspace.output(&format!("{args} --set name=less --set data.held_out=0.01"));
    assert_ne!(workspace.losses("runs/less"), losses);

    // One document cannot be both trained on and held out.
    workspace.output("data prepare songs.txt --out one.tokens --cut 0");
    workspace.assert_fails(
        "train small.toml --set data.source=one.tokens",
        &["would hold out all 1 documents", "set held_out = 0"],
    );
    let args =
        "train small.toml --set data.source=one.tokens --set data.held_out=0 --set train.steps=2";
    workspace.assert_fails(
        args,
        &["train.eval_every", "data.held_out=0 reserves no data for evaluation"],
    );
}

#[test]
fn expert_load_imbalance_and_dropped_tokens_are_reported() {
    let workspace = Workspace::new("experts");
    let args = "--set model.preset=moe-test --set model.capacity=1.0 --set train.steps=2";
    let output = workspace.output(&format!("train small.toml {args}"));
    let line = output.lines().find(|line| line.starts_with("step 2/2 | loss")).expect("a step");
    for part in ["| expert load 0.", "| imbalance 1.", "| dropped "] {
        assert!(line.contains(part), "no {part:?} in: {line}");
    }
    let metrics = workspace.metrics("runs/small");
    let report = metrics.iter().find(|line| line.step == 2 && line.loss.is_some()).expect("step 2");
    let (min, max) = (report.expert_load_min.unwrap(), report.expert_load_max.unwrap());
    let imbalance = report.expert_imbalance.unwrap();
    assert!(min < 1.0 && 1.0 < imbalance && imbalance <= max, "{min} {imbalance} {max}");
    assert!((0.0..1.0).contains(&report.dropped_fraction.unwrap()), "{report:?}");
    let events = workspace.names("runs/small/tensorboard").remove(0);
    let events = std::fs::read(workspace.path("runs/small/tensorboard").join(events)).unwrap();
    for tag in ["load_min", "load_max", "imbalance", "dropped_fraction"] {
        let tag = format!("experts/{tag}");
        assert!(events.windows(tag.len()).any(|part| part == tag.as_bytes()), "no {tag}");
    }
}

/// Four ranks over TCP send 2(N-1)/N of the parameters; ranks that share memory send nothing worth mentioning.
#[test]
fn planned_bytes_equal_the_bytes_sent_over_tcp() {
    let workspace = Workspace::new("planned-bytes");
    let args = "train small.toml --ranks 4 --set train.steps=2 --set train.global_batch=8";
    let output = workspace.output(&format!("{args} --engine tcp"));
    let line = output.lines().find_map(|line| line.strip_prefix("sent per step: "));
    let (planned, measured) = line.and_then(|line| line.split_once(" predicted, ")).unwrap();
    assert_eq!(measured, format!("{planned} measured"), "{output}");
    assert!(output.contains(&format!("; {planned} sent per step")), "{output}");
    let output = workspace.output(&format!("{args} --engine threads --set name=shared"));
    assert!(output.contains(&format!("; {planned} per step in shared memory")), "{output}");
    assert!(output.contains(&format!("communication per step: {planned} in shared memory")));
}
