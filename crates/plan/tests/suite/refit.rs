//! Refitted layouts after ranks were lost, as a table.

use lockstep_plan::{Config, Environment, Plan, refit};

/// A run with 4 layers, 4 KV heads and 16 sequences per step.
fn typed(layout: &str, more: &[&str]) -> Config {
    let text = "[model]\nfamily = \"llama\"\ndim = 64\nlayers = 4\nheads = 4\n[data]\nseq = 32\n\
                [train]\nglobal_batch = 16\nmicro_batch = 1";
    let sets: Vec<String> = more.iter().map(|set| set.to_string()).collect();
    Config::parse(text, &sets).with_layout(layout)
}

fn env(ranks: usize) -> Environment {
    Environment::one_host(ranks, 8).with_vocab(64)
}

/// The degrees greater than 1, in the syntax of a layout.
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
fn refitted_layouts() {
    for (layout, ranks, expected) in [
        // All ranks are present.
        ("data=4", 4, "data=4"),
        ("data=2 tensor=2 pipe=2", 8, "data=2 tensor=2 pipe=2"),
        // Replicas are reduced first; three would not divide the batch.
        ("data=4", 3, "data=2"),
        ("data=4", 1, ""),
        ("data=4 zero=3", 2, "data=2"),
        ("data=2 tensor=2 pipe=2", 7, "tensor=2 pipe=2"),
        ("data=2 tensor=4", 5, "tensor=4"),
        ("data=4 context=2", 7, "data=2 context=2"),
        // More ranks than the layout needs.
        ("data=2", 9, "data=8"),
        ("data=2 tensor=2", 9, "data=4 tensor=2"),
        // Then the model axes: use the most ranks, then change the degrees the least.
        ("tensor=2 pipe=2", 3, "tensor=2"),
        ("tensor=4", 3, "tensor=2"),
        ("tensor=4 pipe=2", 4, "tensor=4"),
        ("tensor=4", 2, "tensor=2"),
        ("tensor=2 pipe=2", 2, "tensor=2"),
        ("pipe=4", 3, "pipe=3"),
        ("pipe=4", 2, "pipe=2"),
        ("context=4", 2, "context=2"),
        ("tensor=2 context=2 pipe=2", 1, ""),
        // Degrees that divide the replicas.
        ("data=4 zero=2 shard=4", 2, "data=2 shard=2"),
        ("data=8 zero=1 shard=2", 4, "data=4 shard=2"),
        // The interleaved schedule is kept if its micro-batches fit, otherwise replaced by the default.
        ("data=2 pipe=2 schedule=interleaved", 2, "pipe=2"),
    ] {
        let found = refit(&typed(layout, &[]), &env(ranks));
        let found = found.unwrap_or_else(|| panic!("{layout} on {ranks}: nothing"));
        assert_eq!(degrees(&found), expected, "{layout} on {ranks}");
        // The layout is valid and the batch is unchanged.
        let plan = Plan::resolve(&found, &env(found.ranks())).expect("the layout is valid");
        assert_eq!(plan.train.global_batch, 16, "{layout} on {ranks}");
        assert_eq!(plan.local_batch() * plan.layout.data, 16, "{layout} on {ranks}");
        assert!(found.ranks() <= ranks);
    }
}

#[test]
fn experts_are_distributed_over_the_remaining_ranks() {
    let moe = ["model.family=moe", "model.experts=4", "model.top_k=2"];
    for (layout, ranks, expected) in
        [("data=4 expert=4", 4, "data=4 expert=4"), ("data=4 expert=4", 3, "data=2 expert=2")]
    {
        let found = refit(&typed(layout, &moe), &env(ranks)).expect("the layout is valid");
        assert_eq!(degrees(&found), expected, "{layout} on {ranks}");
    }
}

#[test]
fn an_invalid_config_has_no_refit() {
    let wrong = typed("data=2", &["model.heads=5"]);
    assert_eq!(refit(&wrong, &env(2)), None);
    assert_eq!(refit(&typed("data=2", &[]), &env(0)), None);
}
