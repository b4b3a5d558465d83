//! The ledger compared with the formulas of papers.

use lockstep_plan::{Config, Environment, Ledger, Plan};

fn plan(ranks: usize, sets: &[&str]) -> Plan {
    let text = "[model]\nfamily = \"llama\"\nvocab = 512\ndim = 64\nlayers = 8\nheads = 8\nseq = 64\n\
                [train]\nglobal_batch = 32\n[precision]\ncompute = \"bf16\"";
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let around = Environment::one_host(ranks, 1);
    Plan::resolve(&Config::parse(text, &sets), &around).unwrap_or_else(|wrong| panic!("{wrong:#?}"))
}

/// Number of parameters of the largest block.
fn largest(plan: &Plan) -> usize {
    plan.model.blocks().iter().map(|block| block.len()).max().unwrap()
}

/// ZeRO (Rajbhandari et al. 2020), mixed precision on d ranks: 4N + 12N/d, 2N + 14N/d and 16N/d, with gradients
/// in two bytes; with four-byte gradients, two bytes more each. The block that is being reduced is added to the formulas.
#[test]
fn states_are_those_of_zero() {
    let d = 4;
    for (zero, (width, gradients)) in
        (1..=3).flat_map(|z| [(2, "bf16"), (4, "f32")].map(|g| (z, g)))
    {
        let (stage, kept) =
            (format!("layout.zero={zero}"), format!("precision.gradients={gradients}"));
        let plan = plan(d, &["layout.data=4", &stage, "train.micro_batch=4", &kept]);
        let n = plan.model.param_count();
        let published = match zero {
            1 => 4 * n + 12 * n / d,
            2 => 2 * n + 14 * n / d,
            _ => 16 * n / d,
        };
        let wider = (width - 2) * if zero == 1 { n } else { n / d };
        for rank in 0..d {
            let Ledger { parameters, gradients, optimizer, .. } = Ledger::of(&plan, rank);
            // ZeRO-1 has all gradients when the first reduction, that of the head, is made. Higher levels have
            // shards of all gradients, and one whole block with its new shard.
            let head = plan.model.blocks().last().unwrap().len();
            let moment = if zero == 1 { head / d } else { largest(&plan) + largest(&plan) / d };
            let all = parameters + gradients + optimizer;
            assert_eq!(all, published + wider + width * moment, "ZeRO-{zero}, rank {rank}");
        }
    }
}

/// ZeRO-2 never has all gradients, because each block is reduced during the pass. ZeRO-1 reduces after the pass.
#[test]
fn without_accumulation_gradients_are_whole_in_zero_1_only() {
    let gradients = |zero| {
        let plan = plan(4, &["layout.data=4", zero, "train.micro_batch=8"]);
        assert_eq!(plan.train.accumulation, 1);
        (plan.model.param_count(), largest(&plan), Ledger::of(&plan, 0).gradients)
    };
    let (n, _, bytes) = gradients("layout.zero=1");
    assert!((4 * n..5 * n).contains(&bytes), "{bytes} of {n} parameters");
    let (n, largest, bytes) = gradients("layout.zero=2");
    assert!(bytes <= n + 4 * largest, "{bytes} of {n} parameters");
}

/// Each stage holds the activations of the micro-batches in flight (Narayanan et al. 2021): all of them with GPipe, one
/// for each remaining stage with 1F1B.
#[test]
fn stages_hold_what_is_under_way() {
    let activations = |schedule: &str, rank| {
        let schedule = format!("layout.schedule={schedule}");
        let plan = plan(4, &["layout.pipe=4", &schedule, "train.micro_batch=4"]);
        assert_eq!(plan.train.accumulation, 8);
        Ledger::of(&plan, rank).activations
    };
    // Inner stages have neither embedding nor head, and the output of a stage exists once.
    let one = activations("1f1b", 1) - activations("1f1b", 2);
    for rank in [1, 2] {
        let output = activations("1f1b", rank) - (4 - rank) * one;
        assert!(output < one / 10, "{output} compared with {one} per micro-batch");
        assert_eq!(activations("gpipe", rank), 8 * one + output);
        assert_eq!(activations("zb-h1", 1) / one, 4, "rank 1 holds as much as rank 0");
    }
}

/// Sequence parallelism shards the activations that tensor parallelism does not (Korthikanti et al. 2022).
#[test]
fn sequence_parallelism_cuts_all_activations() {
    let activations = |sets: &[&str]| {
        let ranks = if sets.is_empty() { 1 } else { 4 };
        Ledger::of(&plan(ranks, sets), 0).activations
    };
    let (alone, tensor) = (activations(&[]), activations(&["layout.tensor=4"]));
    let sequence = activations(&["layout.tensor=4", "layout.sequence=true"]);
    assert!(tensor > alone / 4);
    assert_eq!(sequence, alone / 4);
}
