//! What becomes of a layout when ranks are lost, as a table.

use lockstep_plan::{Config, Environment, Plan, refit};

/// 4 layers, 4 heads of keys: the degrees of the model's axes are 1, 2 and 4.
fn typed(layout: &str, more: &[&str]) -> Config {
    let text = "[model]\nfamily = \"llama\"\ndim = 64\nlayers = 4\nheads = 4\n[data]\nseq = 32\n\
                [train]\nglobal_batch = 16\nmicro_batch = 1";
    let sets: Vec<String> = more.iter().map(|set| set.to_string()).collect();
    Config::parse(text, &sets).with_layout(layout)
}

fn env(ranks: usize) -> Environment {
    Environment::one_host(ranks, 8).with_vocab(64)
}

/// The degrees as they are typed, without those of 1.
fn degrees(config: &Config) -> String {
    let layout = &config.layout;
    let all = [
        ("data", layout.data),
        ("tensor", layout.tensor),
        ("context", layout.context),
        ("pipe", layout.pipe),
        ("shard", layout.shard),
        ("expert", layout.expert),
    ];
    let more = all.into_iter().filter_map(|(name, degree)| Some((name, degree?)));
    let words: Vec<String> =
        more.filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name}={n}")).collect();
    words.join(" ")
}

#[test]
fn what_is_left_of_a_layout() {
    for (layout, ranks, expected) in [
        // All are there.
        ("data=4", 4, "data=4"),
        ("data=2 tensor=2 pipe=2", 8, "data=2 tensor=2 pipe=2"),
        // Replicas go first; three would not divide the batch.
        ("data=4", 3, "data=2"),
        ("data=4", 1, ""),
        ("data=4 zero=3", 2, "data=2"),
        ("data=2 tensor=2 pipe=2", 7, "tensor=2 pipe=2"),
        ("data=2 tensor=4", 5, "tensor=4"),
        ("data=4 context=2", 7, "data=2 context=2"),
        // More than were typed.
        ("data=2", 9, "data=8"),
        ("data=2 tensor=2", 9, "data=4 tensor=2"),
        // Then the model's axes: as many ranks as can be at work, cut as little otherwise as can be.
        ("tensor=2 pipe=2", 3, "tensor=2"),
        ("tensor=4", 3, "tensor=2"),
        ("tensor=4 pipe=2", 4, "tensor=4"),
        ("tensor=4", 2, "tensor=2"),
        ("tensor=2 pipe=2", 2, "tensor=2"),
        ("pipe=4", 3, "pipe=3"),
        ("pipe=4", 2, "pipe=2"),
        ("context=4", 2, "context=2"),
        ("tensor=2 context=2 pipe=2", 1, ""),
        // What is dealt out among replicas.
        ("data=4 zero=2 shard=4", 2, "data=2 shard=2"),
        ("data=8 zero=1 shard=2", 4, "data=4 shard=2"),
        // A schedule that needs rounds of micro-batches keeps them, or gives way.
        ("data=2 pipe=2 schedule=interleaved", 2, "pipe=2"),
    ] {
        let found = refit(&typed(layout, &[]), &env(ranks));
        let found = found.unwrap_or_else(|| panic!("{layout} on {ranks}: nothing"));
        assert_eq!(degrees(&found), expected, "{layout} on {ranks}");
        // It is a layout, and the batch is what it was.
        let plan = Plan::resolve(&found, &env(found.ranks())).expect("it can be");
        assert_eq!(plan.train.global_batch, 16, "{layout} on {ranks}");
        assert_eq!(plan.local_batch() * plan.layout.data, 16, "{layout} on {ranks}");
        assert!(found.ranks() <= ranks);
    }
}

#[test]
fn experts_are_dealt_out_among_those_who_are_left() {
    let moe = ["model.family=moe", "model.experts=4", "model.top_k=2"];
    for (layout, ranks, expected) in
        [("data=4 expert=4", 4, "data=4 expert=4"), ("data=4 expert=4", 3, "data=2 expert=2")]
    {
        let found = refit(&typed(layout, &moe), &env(ranks)).expect("it can be");
        assert_eq!(degrees(&found), expected, "{layout} on {ranks}");
    }
}

#[test]
fn what_cannot_be_on_any_number_of_ranks_is_not_made_up() {
    let wrong = typed("data=2", &["model.heads=5"]);
    assert_eq!(refit(&wrong, &env(2)), None);
    assert_eq!(refit(&typed("data=2", &[]), &env(0)), None);
}
