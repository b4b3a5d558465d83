//! Measures the time to estimate many plans: `cargo run --release -p lockstep-sim --example many`.

use std::time::Instant;

use lockstep_plan::{Config, Environment, Plan, Recompute, schedule::ScheduleKind};
use lockstep_sim::{Cluster, Estimate, MemoryEstimate, Options, estimate, memories};

fn main() {
    let gpt3 = "[model]\nfamily = \"gpt2\"\ndim = 12288\nheads = 96\nlayers = 96\nseq = 2048\nvocab = 51200\n\
                [train]\nglobal_batch = 1536\nmicro_batch = 1\n[precision]\ncompute = \"bf16\"\n";
    many("GPT-3 175B on 384 A100", gpt3, 384, "a100-80");
    let llama = "[model]\npreset = \"llama3-405b\"\nseq = 8192\n[train]\nglobal_batch = 2048\nmicro_batch = 1\n\
                 [precision]\ncompute = \"bf16\"\n";
    many("Llama-3 405B on 16,384 H100", llama, 16384, "h100");
}

/// Many combinations of degrees and options.
fn many(title: &str, text: &str, ranks: usize, cluster: &str) {
    // Resolved once on one rank; the layouts are variations of it.
    let plan = Plan::resolve(&Config::parse(text, &[]), &Environment::one_host(1, 8));
    let mut base = plan.unwrap_or_else(|errors| panic!("{errors:?}"));
    base.ranks = ranks;
    let cluster = Cluster::built_in(cluster).expect("it is built in");
    let batch = base.train.global_batch;
    let plans = layouts(&base, batch);
    let options = Options::default();
    let start = Instant::now();
    let fit = plans.iter().filter(|plan| {
        let fits = |memory: &MemoryEstimate| memory.total() <= cluster.accelerator.memory();
        memories(plan, &cluster, &options).iter().all(fits)
    });
    let fit = fit.count();
    let asked = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let (mut best, mut slowest) = (None::<(Estimate, &Plan)>, 0.0_f64);
    for plan in &plans {
        let one = Instant::now();
        let predicted = estimate(plan, &cluster, &options);
        slowest = slowest.max(one.elapsed().as_secs_f64());
        let better = best.as_ref().is_none_or(|(best, _)| predicted.step_s < best.step_s);
        if predicted.fits && better {
            best = Some((predicted, plan));
        }
    }
    let together = start.elapsed().as_secs_f64();
    let each = |seconds: f64| 1e6 * seconds / plans.len() as f64;
    println!(
        "{title}: {} plans, {:.1} µs each, {:.0} µs at most, {together:.2} s together; {fit} fit, which takes {:.1} µs each to know",
        plans.len(),
        each(together),
        1e6 * slowest,
        each(asked),
    );
    if let Some((predicted, plan)) = best {
        let l = &plan.layout;
        println!(
            "  best: data {} zero {} tensor {} pipe {} chunks {} micro-batch {} recompute {:?}: {:.2} s, MFU {:.1}%",
            l.data,
            l.zero,
            l.tensor,
            l.pipe,
            l.chunks,
            plan.train.micro_batch,
            l.recompute,
            predicted.step_s,
            100.0 * predicted.mfu
        );
    }
}

fn layouts(base: &Plan, batch: usize) -> Vec<Plan> {
    let mut plans = Vec::new();
    let fits = |pipe: &usize, tensor: usize| {
        *pipe <= base.model.layers && base.ranks.is_multiple_of(tensor * pipe)
    };
    for tensor in [1, 2, 4, 8] {
        for pipe in [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
            .into_iter()
            .filter(|pipe| fits(pipe, tensor))
        {
            let data = base.ranks / tensor / pipe;
            for micro in [1, 2, 4, 8].into_iter().filter(|micro| batch.is_multiple_of(data * micro))
            {
                let accumulation = batch / data / micro;
                for (zero, recompute, chunks) in choices() {
                    let stages = pipe * chunks;
                    let rounds = accumulation.is_multiple_of(pipe)
                        && base.model.layers.is_multiple_of(stages);
                    if chunks > 1 && (pipe == 1 || !rounds) {
                        continue;
                    }
                    let mut plan = base.clone();
                    plan.layout.tensor = tensor;
                    plan.layout.sequence = tensor > 1;
                    plan.layout.pipe = pipe;
                    plan.layout.data = data;
                    plan.layout.zero = zero;
                    plan.layout.shard = if zero > 0 { data } else { 1 };
                    plan.layout.recompute = recompute;
                    plan.layout.chunks = chunks;
                    plan.layout.schedule = if chunks > 1 {
                        ScheduleKind::Interleaved
                    } else {
                        ScheduleKind::OneForwardOneBackward
                    };
                    plan.train.micro_batch = micro;
                    plan.train.accumulation = accumulation;
                    plan.train.global_batch = batch;
                    plans.push(plan);
                }
            }
        }
    }
    plans
}

fn choices() -> impl Iterator<Item = (u8, Recompute, usize)> {
    let recomputes = [Recompute::None, Recompute::Selective, Recompute::Full];
    (0..4).flat_map(move |zero| {
        recomputes
            .into_iter()
            .flat_map(move |recompute| [1, 2, 3, 4, 6].map(|chunks| (zero, recompute, chunks)))
    })
}
