//! Runs that come to their end, and what they leave.

use lockstep_plan::Plan;

use crate::desk::{Desk, alike};

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
