//! Arbitrary text as a run file, followed by `--set` overrides after a zero byte: it is rejected, or its plan can be
//! printed, counted and scheduled.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_fuzz::timed;
use lockstep_plan::model::flops_per_token;
use lockstep_plan::{Config, Environment, Ledger, Plan, traffic};

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let (file, sets) = text.split_once('\0').unwrap_or((&text, ""));
    let sets: Vec<String> = sets.lines().map(String::from).collect();
    timed(|| {
        let config = Config::parse(file, &sets);
        let env = Environment::one_host(config.ranks(), 8).with_vocab(257);
        match Plan::resolve(&config, &env) {
            Ok(plan) => use_plan(&plan),
            Err(errors) => assert!(errors.iter().all(|error| !error.to_string().is_empty())),
        }
    });
});

fn use_plan(plan: &Plan) {
    let json = serde_json::to_string(plan).expect("a plan is JSON");
    assert_eq!(serde_json::from_str::<Plan>(&json).expect("the plan that was written"), *plan);
    assert!(flops_per_token(&plan.model, plan.data.seq).total() > 0.0);
    let last = plan.ranks - 1;
    assert!(Ledger::of(plan, last).total() >= Ledger::of(plan, last).optimizer);
    traffic(plan, last);
}
