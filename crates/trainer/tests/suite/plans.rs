//! Plans of small runs, their data, and their parameters.

use lockstep_data::{Options, Source};
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::Rank;

pub fn plan(ranks: usize, sets: &[&str]) -> Plan {
    plan_of(&source(), ranks, sets)
}

/// `ranks` ranks on one host with one core, on the device that `LOCKSTEP_DEVICE` names.
pub fn environment(ranks: usize) -> Environment {
    let gpu = std::env::var("LOCKSTEP_DEVICE").is_ok_and(|device| device == "cuda");
    Environment { gpu, ..Environment::one_host(ranks, 1) }
}

/// A plan for the given data.
pub fn plan_of(source: &Source, ranks: usize, sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let text = "name = \"test\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 20\nglobal_batch = 12\n\
                micro_batch = 2\nthreads = 1\neval_every = 0\neval_batches = 1";
    let environment = environment(ranks).with_vocab(source.vocab());
    Plan::resolve(&Config::parse(text, &sets), &environment).unwrap_or_else(|errors| {
        panic!("{}", errors.iter().map(|error| format!("{error}\n")).collect::<String>())
    })
}

pub fn source() -> Source {
    Source::open("builtin:grammar", &Options::default()).unwrap()
}

/// Master weights of a rank's shards, concatenated.
pub fn masters(rank: &Rank<'_>) -> Vec<f32> {
    let weights = &rank.store.weights;
    let units = |block| (0..weights.shards(block).count()).map(move |unit| (block, unit));
    (0..weights.blocks())
        .flat_map(units)
        .flat_map(|(block, unit)| rank.device.to_vec::<f32>(weights.own(block, unit)))
        .collect()
}
