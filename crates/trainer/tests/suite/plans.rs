//! Small runs as text.

use lockstep_data::{Options, Source};
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::Rank;

pub fn plan(ranks: usize, sets: &[&str]) -> Plan {
    plan_of(&source(), ranks, sets)
}

/// A run on other data.
pub fn plan_of(source: &Source, ranks: usize, sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let text = "name = \"test\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 20\nglobal_batch = 12\n\
                micro_batch = 2\nthreads = 1\neval_every = 0\neval_batches = 1";
    let around = Environment::one_host(ranks, 1).with_vocab(source.vocab());
    Plan::resolve(&Config::parse(text, &sets), &around).unwrap_or_else(|mistakes| {
        panic!("{}", mistakes.iter().map(|m| format!("{m}\n")).collect::<String>())
    })
}

pub fn source() -> Source {
    Source::open("builtin:grammar", &Options::default()).unwrap()
}

/// The masters that are on a rank, in a row.
pub fn masters(rank: &Rank<'_>) -> Vec<f32> {
    let weights = &rank.store.weights;
    let units = |block| (0..weights.shards(block).count()).map(move |unit| (block, unit));
    (0..weights.blocks())
        .flat_map(units)
        .flat_map(|(block, unit)| weights.own(block, unit).host::<f32>().to_vec())
        .collect()
}
