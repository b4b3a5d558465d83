//! Measures the duration of a search on one core: `cargo run --release -p lockstep-sim --example search`. Reports CPU time,
//! which a busy machine affects the least.

use lockstep_plan::Config;
use lockstep_sim::search::{Limits, Objective, Search, SearchRequest, layout_words, reasons};
use lockstep_sim::{Cluster, Options};

fn main() {
    let cases =
        [("gpt3-175b", 1536, 2048, "a100-80", 384), ("llama3-405b", 2048, 8192, "h100", 16384)];
    for (preset, global_batch, seq, cluster, ranks) in cases {
        let text = format!(
            "[model]\npreset = \"{preset}\"\n[data]\nseq = {seq}\n[train]\nglobal_batch = {global_batch}\n\
             [precision]\ncompute = \"bf16\"\n"
        );
        let config = Config::parse(&text, &[]);
        let cluster = Cluster::built_in(cluster).expect("a built-in cluster");
        let options = Options::default();
        let request = SearchRequest {
            config: &config,
            vocab: None,
            cluster: &cluster,
            options: &options,
            ranks: vec![ranks],
        };
        for by in [Objective::Time, Objective::Memory, Objective::Cost] {
            let start = core_seconds();
            let search = Search::new(&request).expect("a preset is a model");
            let grouped = core_seconds() - start;
            let best = search.best(by, 5, &Limits::default());
            let seconds = core_seconds() - start;
            println!(
                "{preset} on {ranks} {}, by {by:?}: {seconds:.2} s (groups {grouped:.2}), {:?}",
                cluster.name,
                search.stats()
            );
            if let (Objective::Time, Some(first)) = (by, best.first()) {
                let reasons = reasons(&search, first, by);
                println!("  with reasons: {:.2} s", (core_seconds() - start));
                reasons.iter().for_each(|reason| println!("    {}", reason.line()));
                let ladder = lockstep_sim::advice::ladder(&search, &cluster);
                println!("  with advice: {:.2} s", (core_seconds() - start));
                ladder.iter().for_each(|step| {
                    println!("    {} {} {}", step.technique, step.taken, step.why)
                });
            }
            for proposal in best {
                let (estimate, train) = (&proposal.estimate, &proposal.plan.train);
                println!(
                    "  {:8.3} s  mfu {:4.1}%  {:5.1} GiB  micro_batch={} {}",
                    estimate.step_s,
                    100.0 * estimate.mfu,
                    proposal.bytes() / (1u64 << 30) as f64,
                    train.micro_batch,
                    layout_words(&proposal.plan)
                );
            }
        }
    }
}

/// CPU seconds of this thread.
fn core_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("this is Linux");
    let nanoseconds = text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
    nanoseconds.expect("the first number is nanoseconds on a core") / 1e9
}
