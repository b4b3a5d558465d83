//! Plans of small models, written as one line.

use lockstep_plan::{Config, Plan};

use crate::plans::{environment, source};

/// Parses e.g. `llama data=2 zero=3 train.micro_batch=2`: a model family, then settings. Keys without a section belong
/// to `[layout]`. 12 heads and sequences of 24 tokens are divisible by 2, 3 and 4.
pub fn plan(words: &str) -> Plan {
    let mut words = words.split_whitespace();
    let family = words.next().expect("a family");
    let mut text = format!(
        "name = \"test\"\n[model]\nfamily = \"{family}\"\ndim = 48\nlayers = 4\nheads = 12\nffn = 96\nseq = 24\n"
    );
    text += match family {
        "gpt2" => "",
        "llama" => "kv_heads = 2\n",
        // Every token goes to every expert, so that the load is balanced.
        _ => "kv_heads = 2\nexperts = 4\ntop_k = 4\naux_loss = 0.02\nz_loss = 0.01\n",
    };
    text += "[train]\nsteps = 20\nglobal_batch = 12\nmicro_batch = 1\nthreads = 1\n[layout]\ndata = 1\n";
    let set = |word: &str| match word.split_once('=').expect("a setting").0.contains('.') {
        true => word.to_string(),
        false => format!("layout.{word}"),
    };
    let sets: Vec<String> = words.map(set).collect();
    let config = Config::parse(&text, &sets);
    let environment = environment(config.layout.ranks()).with_vocab(source().vocab());
    Plan::resolve(&config, &environment).unwrap_or_else(|errors| {
        panic!("{}", errors.iter().map(|error| format!("{error}\n")).collect::<String>())
    })
}
