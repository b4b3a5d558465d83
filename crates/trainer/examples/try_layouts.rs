use lockstep_comm::Options;
use lockstep_data::{Options as DataOptions, Source};
use lockstep_plan::{Config, Plan, Surroundings};
use lockstep_trainer::{Tolerance, course_on_threads};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let family = &args[0];
    let source = Source::open("builtin:grammar", &DataOptions::default()).unwrap();
    let text = |layout: &str| {
        let kv = if family == "gpt2" { 12 } else { 2 };
        let moe = if family == "moe" {
            "experts = 12\ntop_k = 2\naux_loss = 0.02\nz_loss = 0.01\n"
        } else {
            ""
        };
        format!(
            "name = \"test\"\n[model]\nfamily = \"{family}\"\ndim = 48\nlayers = 4\nheads = 12\nkv_heads = {kv}\nffn = 48\nseq = 24\n{moe}[train]\nsteps = 20\nglobal_batch = 12\nmicro_batch = 1\nlr = 1e-2\nwarmup = 2\nthreads = 1\n[layout]\n{layout}"
        )
    };
    let plan = |layout: &str| {
        let config = Config::parse(&text(layout), &[]);
        let around = Surroundings::one_host(config.ranks(), 1).with_vocab(source.vocab());
        Plan::resolve(&config, &around)
            .map_err(|m| m.iter().map(|m| m.to_string()).collect::<Vec<_>>().join("\n"))
    };
    let steps = 20;
    let one = course_on_threads(&plan("").unwrap(), &Options::default(), &source, steps).unwrap();
    println!("{:?}", one.losses);
    for layout in &args[1..] {
        let layout = layout.replace(',', "\n");
        match plan(&layout) {
            Err(e) => println!("{layout:?}: refused: {e}"),
            Ok(plan) => match course_on_threads(&plan, &Options::default(), &source, steps) {
                Err(e) => println!("{layout:?}: {e}"),
                Ok(course) => {
                    let d = one.difference(&course, &Tolerance::F32);
                    println!(
                        "{:?}: {} loss {:.1e} norm {:.1e} weights {:.1e} {:?}",
                        layout,
                        if d.within(&Tolerance::F32) { "ok" } else { "BAD" },
                        d.loss,
                        d.grad_norm,
                        d.weights,
                        d.tensor
                    );
                }
            },
        }
    }
}
