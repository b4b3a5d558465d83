//! Small runs as text.

use lockstep_data::{Options, Source};
use lockstep_plan::{Config, Plan, Surroundings};

pub fn plan(ranks: usize, sets: &[&str]) -> Plan {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let text = "name = \"test\"\n[model]\npreset = \"gpt2-test\"\n[train]\nsteps = 20\nglobal_batch = 12\n\
                micro_batch = 2\nthreads = 1\neval_every = 0\neval_batches = 1";
    let around = Surroundings::one_host(ranks, 1).with_vocab(source().vocab());
    Plan::resolve(&Config::parse(text, &sets), &around).unwrap_or_else(|mistakes| {
        panic!("{}", mistakes.iter().map(|m| format!("{m}\n")).collect::<String>())
    })
}

pub fn source() -> Source {
    Source::open("builtin:grammar", &Options::default()).unwrap()
}
