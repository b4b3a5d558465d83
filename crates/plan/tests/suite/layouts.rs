//! The default layouts of `lockstep verify`.

use lockstep_plan::{Config, Environment, Plan, layouts};

const VOCAB: usize = 64;

fn config(model: &str) -> Config {
    Config::parse(
        &format!(
            "name = \"test\"\n[model]\n{model}\ndim = 48\nheads = 12\nlayers = 4\nseq = 24\n\
             [train]\nglobal_batch = 24\nmicro_batch = 1\n[layout]\ndata = 2"
        ),
        &[],
    )
}

fn resolved(config: &Config, words: &str) -> Result<Plan, Vec<String>> {
    let config = config.with_layout(words);
    let env = Environment::one_host(config.ranks(), 1).with_vocab(VOCAB);
    Plan::resolve(&config, &env).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

#[test]
fn every_axis_and_option_is_covered() {
    let words = |model| layouts(&config(model), VOCAB, 8, 24);
    let gpt2 = words("family = \"gpt2\"");
    let llama = words("family = \"llama\"\nkv_heads = 2");
    let moe = words("family = \"moe\"\nkv_heads = 2\nexperts = 12");
    #[rustfmt::skip]
    let wanted = [
        "data=2", "data=3", "data=4", "tensor=2", "tensor=3", "tensor=4", "context=2", "context=3", "context=4",
        "pipe=2", "pipe=3", "pipe=4", "zero=1", "zero=2", "zero=3", "shard=2", "keep_gathered=true", "sequence=true",
        "context_kind=ulysses", "context_kind=both", "schedule=gpipe", "schedule=interleaved", "schedule=zb-h1",
        "schedule=zb-h2", "recompute=selective", "recompute=full",
    ];
    for (all, more) in [(&gpt2, None), (&llama, None), (&moe, Some("expert=2"))] {
        for word in wanted.iter().copied().chain(more) {
            // Two KV heads can be shared by two or four ranks, but not by three.
            if word != "tensor=3" || std::ptr::eq(all, &gpt2) {
                assert!(
                    all.iter().any(|words| words.split(' ').any(|w| w == word)),
                    "{word}: {all:#?}"
                );
            }
        }
        assert_eq!(all.len(), 24);
        let axes = |words: &String| {
            words.split(' ').filter(|word| word.ends_with(|c: char| c > '1')).count()
        };
        assert!(all.iter().any(|words| axes(words) >= 3), "{all:#?}");
    }
}

#[test]
fn layouts_are_valid_limited_and_deterministic() {
    for model in
        ["family = \"gpt2\"", "family = \"moe\"\nkv_heads = 4\nexperts = 6\ncapacity = 1.5"]
    {
        let config = config(model);
        for (ranks, count) in [(1, 24), (2, 24), (4, 3), (6, 100), (8, 24)] {
            let some = layouts(&config, VOCAB, ranks, count);
            assert!(some.len() <= count);
            assert_eq!(some.is_empty(), ranks == 1);
            for words in &some {
                let plan =
                    resolved(&config, words).unwrap_or_else(|why| panic!("{words}: {why:?}"));
                assert!((2..=ranks).contains(&plan.ranks), "{words}");
            }
            let different: std::collections::BTreeSet<&String> = some.iter().collect();
            assert_eq!(different.len(), some.len(), "{some:#?}");
            assert_eq!(some, layouts(&config, VOCAB, ranks, count));
        }
    }
}

#[test]
fn no_layouts_if_nothing_can_be_split() {
    let text =
        "[model]\ndim = 5\nheads = 1\nffn = 7\nlayers = 1\nseq = 7\n[train]\nglobal_batch = 1";
    assert!(layouts(&Config::parse(text, &[]), VOCAB, 6, 24).is_empty());
}

#[test]
fn words_replace_the_layout_of_the_file() {
    let config = config("family = \"gpt2\"");
    let plan = resolved(&config, "tensor=2,  sequence=true\tpipe=2,schedule=zb-h1").unwrap();
    assert_eq!((plan.layout.data, plan.layout.tensor, plan.layout.pipe, plan.ranks), (1, 2, 2, 4));
    #[rustfmt::skip]
    let wrong = [
        ("tensor=5", "layout.tensor (--layouts): tensor=5 does not divide heads=12; use 4 or 6"),
        ("tensor", "layout (--layouts): `tensor` has no `=`; write for example tensor=2"),
        ("tensr=2", "layout.tensr (--layouts): unknown key; did you mean layout.tensor?"),
        ("pipe=two", "layout.pipe (--layouts): pipe must be a non-negative integer, e.g. 8 (got two)"),
        ("expert=2", "layout.expert (--layouts): expert=2, but the model has no experts; remove it, or set family = \"moe\""),
    ];
    for (words, expected) in wrong {
        assert_eq!(resolved(&config, words).unwrap_err()[0], expected, "{words}");
    }
}
