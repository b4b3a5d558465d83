//! Consistency and cost of estimates.

use crate::tables::plan;
use lockstep_plan::schedule::Schedule;
use lockstep_plan::{Config, Coord, Environment, GroupKind, Ledger, Plan, layouts};
use lockstep_sim::{Cluster, Deviation, Flow, Options, estimate, memories, traffic};

fn llama(layout: &str, ranks: usize) -> lockstep_plan::Plan {
    let text = format!(
        "[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 64\nmicro_batch = 1\n\
         [layout]\n{layout}\n[precision]\ncompute = \"bf16\"\n"
    );
    plan(&text, ranks)
}

fn some_plans() -> Vec<lockstep_plan::Plan> {
    let layouts = [
        ("data = 8\nzero = 3", 8),
        ("data = 2\nzero = 1\ntensor = 2\nsequence = true\npipe = 2", 8),
        ("tensor = 2\npipe = 4\nschedule = \"interleaved\"\nchunks = 2\nrecompute = \"full\"", 8),
        ("pipe = 8\nschedule = \"zb-h1\"\ndata = 2", 16),
        ("context = 4\ntensor = 2\nsequence = true\ndata = 2\nzero = 2", 16),
        ("context = 4\ncontext_kind = \"ulysses\"\ndata = 4\nzero = 3\nshard = 8", 16),
    ];
    layouts.iter().map(|(layout, ranks)| llama(layout, *ranks)).collect()
}

#[test]
fn time_breakdown_adds_up() {
    let cluster = Cluster::built_in("h100").unwrap();
    for plan in some_plans() {
        let estimate = estimate(&plan, &cluster, &Options::default());
        assert!((estimate.time.total() / estimate.step_s - 1.0).abs() < 1e-9);
        assert!(estimate.time.bubble > -1e-9 * estimate.step_s, "{:?}", estimate.time);
        assert!(
            estimate.hfu >= estimate.mfu_causal * 0.999,
            "{} {}",
            estimate.hfu,
            estimate.mfu_causal
        );
    }
}

/// The first stage ends last. If it has fewer layers than the others, it mostly waits, but the step does not.
#[test]
fn the_breakdown_describes_the_busiest_rank() {
    let cluster = Cluster::built_in("h100").unwrap();
    let text = "[model]\npreset = \"llama3-405b\"\nseq = 8192\n[train]\nglobal_batch = 1024\nmicro_batch = 1\n\
                [layout]\ndata = 2\nzero = 1\ntensor = 8\nsequence = true\npipe = 64\n[precision]\ncompute = \"bf16\"\n";
    let estimate = estimate(&plan(text, 1024), &cluster, &Options::default());
    let (time, stages) = (&estimate.time, &estimate.stages);
    let busiest = stages.iter().map(|stage| stage.busy).fold(0.0, f64::max);
    assert!(stages[0].busy < 0.6 * busiest, "{} {busiest}", stages[0].busy);
    let working = time.compute + time.host + time.tensor + time.context + time.expert;
    assert!(working > 0.99 * busiest && working < 1.01 * busiest, "{time:?} {busiest}");
    assert!(time.bubble < 0.2 * estimate.step_s, "{time:?}");
    // The rate is that of the same rank: stages compute equally fast, whatever their number of layers.
    assert!(estimate.compute_rate < 0.8, "{}", estimate.compute_rate);
    assert!((time.total() / estimate.step_s - 1.0).abs() < 1e-9);
}

/// Parameters by formula equal those that a rank holds.
#[test]
fn parameters_match_the_parts() {
    let cluster = Cluster::built_in("h100").unwrap();
    let options = Options::default();
    let moe = plan(
        "[model]\npreset = \"mixtral-8x7b\"\nseq = 4096\n[train]\nglobal_batch = 16\nmicro_batch = 1\n\
         [layout]\ndata = 4\nexpert = 4\npipe = 2\n[precision]\ncompute = \"bf16\"\n",
        8,
    );
    let gpt2 = plan(
        "[model]\npreset = \"gpt2-1.5b\"\nvocab = 50304\n[train]\nglobal_batch = 16\n[layout]\ntensor = 1\npipe = 4\n\
         [precision]\ncompute = \"bf16\"\n",
        4,
    );
    let latent = plan(
        "[model]\npreset = \"deepseek-v2-lite\"\nseq = 4096\n[train]\nglobal_batch = 16\nmicro_batch = 1\n\
         [layout]\ndata = 4\nexpert = 4\ntensor = 2\npipe = 5\n[precision]\ncompute = \"bf16\"\n",
        40,
    );
    for plan in some_plans().into_iter().chain([moe, gpt2, latent]) {
        let estimate = estimate(&plan, &cluster, &options);
        for (pipe, stage) in estimate.stages.iter().enumerate() {
            let first = Coord { pipe, data: 0, context: 0, tensor: 0 };
            let held = plan.part(plan.mesh().rank(first)).len() as f64;
            let cut = if plan.layout.zero == 3 { plan.layout.shard as f64 } else { 1.0 };
            let predicted = stage.memory.parameters / options.software.weights * cut;
            assert!((predicted / held - 1.0).abs() < 1e-6, "{predicted} {held} {:?}", plan.layout);
        }
    }
}

/// Formula and ledger agree: the same states, and nearly the same activations.
#[test]
fn memory_formula_matches_the_ledger() {
    let cluster = Cluster::built_in("h100").unwrap();
    let (quick, exact) = (Options::default(), Options { exact: true, ..Options::default() });
    for plan in some_plans() {
        let (quick, exact) = (memories(&plan, &cluster, &quick), memories(&plan, &cluster, &exact));
        for (pipe, (quick, exact)) in quick.iter().zip(&exact).enumerate() {
            let first = Coord { pipe, data: 0, context: 0, tensor: 0 };
            let ledger = Ledger::of(&plan, plan.mesh().rank(first));
            let counted = exact.states() + exact.activations + exact.gathered;
            // Accelerators write checkpoints from host memory.
            let on_device = ledger.total() - ledger.snapshot;
            assert_eq!(counted, on_device as f64, "{:?}", plan.layout);
            let error = quick.allocated() / exact.allocated() - 1.0;
            println!(
                "{:5.1}% of {:6.2} GB {:?}",
                100.0 * error,
                exact.allocated() / 1e9,
                plan.layout
            );
            assert!(error.abs() < 0.03, "{error} {quick:?} {exact:?} {:?}", plan.layout);
        }
    }
}

/// The communication formulas send the bytes that the plan counts.
#[test]
fn traffic_formula_matches_the_plan() {
    let cluster = Cluster::built_in("h100").unwrap();
    for plan in some_plans() {
        let sent = |flows: &[Flow], wanted: fn(GroupKind) -> bool| -> f64 {
            let of_group = flows.iter().filter(|flow| flow.kind.is_some_and(wanted));
            of_group.map(Flow::sent).sum()
        };
        let quick = estimate(&plan, &cluster, &Options::default()).flows;
        let exact = traffic(&plan, &cluster, 0);
        type Filter = fn(GroupKind) -> bool;
        let kinds: [(&str, Filter); 3] = [
            ("tensor", |kind| kind == GroupKind::Tensor),
            ("pipe", |kind| kind == GroupKind::Pipe),
            ("data", |kind| {
                matches!(kind, GroupKind::Shard | GroupKind::Gather | GroupKind::Copies)
            }),
        ];
        for (name, wanted) in kinds {
            let (quick, exact) = (sent(&quick, wanted), sent(&exact, wanted));
            println!("{name}: {:.3} and {:.3} GB {:?}", quick / 1e9, exact / 1e9, plan.layout);
            assert!(
                (quick - exact).abs() <= 0.2 * exact,
                "{name}: {quick} {exact} {:?}",
                plan.layout
            );
        }
    }
}

/// Every axis, option and family gives a finite estimate.
#[test]
fn every_layout_has_an_estimate() {
    let clusters = ["cpu", "a100-ethernet"].map(|name| Cluster::built_in(name).unwrap());
    for preset in ["gpt2-test", "llama-test", "moe-test"] {
        let text =
            format!("[model]\npreset = \"{preset}\"\nvocab = 64\n[train]\nglobal_batch = 16\n");
        let config = Config::parse(&text, &[]);
        let all = layouts(&config, 64, 4, 60);
        assert!(all.len() > 15, "{preset}: {}", all.len());
        for words in all {
            let config = config.with_layout(&words);
            let env = Environment::one_host(config.ranks(), 1).with_vocab(64);
            let plan = Plan::resolve(&config, &env).unwrap();
            for cluster in &clusters {
                for exact in [false, true] {
                    let options = Options { exact, ..Options::default() };
                    let predicted = estimate(&plan, cluster, &options);
                    let finite = predicted.step_s.is_finite() && predicted.step_s > 0.0;
                    assert!(finite && predicted.fits, "{preset} {words}: {predicted:?}");
                    let parts = (predicted.time.total() / predicted.step_s - 1.0).abs();
                    assert!(
                        parts < 1e-9 && predicted.time.bubble > -1e-9,
                        "{preset} {words}: {:?}",
                        predicted.time
                    );
                }
            }
        }
    }
}

/// One slow rank slows the whole step, in whichever replica it is.
#[test]
fn a_slow_rank_slows_all() {
    let even = Cluster::built_in("h100").unwrap();
    let plan = llama("data = 2\nzero = 1\ntensor = 2\npipe = 4", 16);
    let options = Options::default();
    let step =
        |differs: Vec<Deviation>| estimate(&plan, &Cluster { differs, ..even.clone() }, &options);
    let slow = |ranks: &[usize], compute: f64, link: f64| Deviation {
        hosts: Vec::new(),
        ranks: ranks.to_vec(),
        compute,
        link,
        memory_gib: None,
    };
    let whole = step(Vec::new());
    let half = step(vec![slow(&[0], 0.5, 1.0)]);
    assert!(half.step_s > 1.4 * whole.step_s && half.step_s < 2.1 * whole.step_s);
    assert!((half.time.straggling - (half.step_s - whole.step_s)).abs() < 1e-9);
    // The same stage of the other replica, and all ranks at once.
    let other = plan.mesh().rank(Coord { data: 1, ..plan.mesh().coord(0) });
    assert_eq!(step(vec![slow(&[other], 0.5, 1.0)]).step_s, half.step_s);
    let all: Vec<usize> = (0..16).collect();
    let everywhere = step(vec![slow(&all, 0.5, 1.0)]).step_s;
    assert!(everywhere > half.step_s && everywhere < 2.1 * whole.step_s);
    assert!(step(vec![slow(&[3], 1.0, 0.1)]).step_s > whole.step_s);
    let small = Deviation { memory_gib: Some(1.0), ..slow(&[5], 1.0, 1.0) };
    assert!(whole.fits && !step(vec![small]).fits);
}

#[test]
fn micro_batches_in_flight_match_the_schedule() {
    let cluster = Cluster::built_in("h100").unwrap();
    for layout in ["pipe = 4", "pipe = 4\nschedule = \"gpipe\"", "pipe = 4\nchunks = 2"] {
        let plan = llama(layout, 4);
        let schedule: Schedule = plan.schedule();
        let estimate = estimate(&plan, &cluster, &Options::default());
        // Middle stages differ only in the micro-batches in flight.
        let bytes = |rank: usize| estimate.stages[rank].memory.activations;
        let passes = |rank: usize| schedule.in_flight(rank).until_weights as f64;
        assert!((bytes(1) / bytes(2) - passes(1) / passes(2)).abs() < 1e-9, "{layout}");
    }
}

/// The cost of an estimate does not grow with the number of ranks or micro-batches.
#[test]
fn sixteen_thousand_ranks() {
    let cluster = Cluster::built_in("h100").unwrap();
    let text = "[model]\npreset = \"llama3-405b\"\nseq = 8192\n[train]\nglobal_batch = 2048\nmicro_batch = 1\n\
                [layout]\ndata = 128\nzero = 1\ntensor = 8\nsequence = true\npipe = 16\n[precision]\ncompute = \"bf16\"\n";
    let estimate = estimate(&plan(text, 16384), &cluster, &Options::default());
    assert!(estimate.mfu > 0.2 && estimate.mfu < 0.6, "{}", estimate.mfu);
}

#[test]
fn tensor_parallelism_on_a_slow_link_is_a_warning_with_its_cost() {
    use lockstep_sim::advice::slow_tensor;
    let options = Options::default();
    let warning = |layout: &str, ranks: usize, cluster: &str| {
        let (plan, cluster) = (llama(layout, ranks), Cluster::built_in(cluster).unwrap());
        let found = estimate(&plan, &cluster, &options);
        let slow = slow_tensor(&plan, &cluster, &options, &found);
        slow.inspect(|slow| assert!(slow.lost_s > 0.0 && slow.lost_s < found.step_s))
    };
    assert_eq!(warning("tensor = 8\nsequence = true\ndata = 2", 16, "h100"), None);
    assert_eq!(warning("data = 16\nzero = 3", 16, "a100-ethernet"), None);
    let across = warning("tensor = 16\nsequence = true", 16, "h100-96");
    let across = across.expect("tensor groups span hosts");
    assert_eq!(across.link, "RoCE 400G");
    assert!(across.fix.contains("use layout.tensor <= 8"), "{across}");
    let placed = warning("tensor = 8\ndata = 2\nzero = 3", 16, "a100-ethernet");
    let placed = placed.expect("ZeRO-3 is placed inside hosts");
    assert!(placed.fix.contains("pipe,context,data,tensor"), "{placed}");
    let pcie = warning("tensor = 8\nsequence = true", 8, "a100-ethernet").expect("PCIe is slow");
    assert_eq!(pcie.link, "PCIe");
    assert!(pcie.to_string().contains("use layout.tensor <= 1"), "{pcie}");
}
