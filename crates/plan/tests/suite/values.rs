//! `--set` overrides, and accepted spellings of values.

use lockstep_plan::{Config, Place};

fn set(text: &str, sets: &[&str]) -> Config {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let config = Config::parse(text, &sets);
    assert_eq!(config.errors, [], "{text} {sets:?}");
    config
}

#[test]
fn set_overrides_the_file_and_the_last_wins() {
    let config = set("[train]\nlr = 1.0\nsteps = 5", &["train.lr=2.0", "train.lr = 3e-4"]);
    assert_eq!((config.train.lr, config.train.steps), (Some(3e-4), Some(5)));
    assert_eq!(config.places["train.lr"], Place::Set);
    assert_eq!(config.places["train.steps"], Place::Line(3));
}

#[test]
fn set_needs_no_quotes() {
    let config =
        set("", &["model.family=llama", "name=7", "train.sample=a b", "data.source=\"x=y\""]);
    assert_eq!(config.model.family, Some(lockstep_plan::model::Family::Llama));
    assert_eq!(config.name.as_deref(), Some("7"));
    assert_eq!(config.train.sample.as_deref(), Some("a b"));
    assert_eq!(config.data.source.as_deref(), Some("x=y"));
}

#[test]
fn set_accepts_lists_and_tables() {
    let config = set(
        "[model.rope_scaling]\nfactor = 4.0",
        &["train.betas=[0.5, 0.6]", "model.rope_scaling={ factor = 8, original_seq = 64 }"],
    );
    assert_eq!(config.train.betas, Some([0.5, 0.6]));
    assert_eq!(config.model.rope_scaling.factor, Some(8.0));
    assert_eq!(config.model.rope_scaling.original_seq, Some(64));
}

#[test]
fn integers_may_be_written_in_scientific_notation() {
    let config = set("[train]\nsteps = 1e3\nglobal_batch = 1_024\nseed = 0xff\nlr = 1", &[]);
    let train = config.train;
    assert_eq!((train.steps, train.global_batch, train.seed), (Some(1000), Some(1024), Some(255)));
    assert_eq!(train.lr, Some(1.0));
}

#[test]
fn an_empty_file_sets_nothing() {
    assert_eq!(set("", &[]), Config::default());
    assert_eq!(set("[model]\n[train]", &[]).model, Config::default().model);
    assert_eq!(Config::default().ranks(), 1);
}
