//! Arbitrary text as a cluster file: it is rejected, or a step on it takes a finite time.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lockstep_fuzz::timed;
use lockstep_plan::{Config, Plan};
use lockstep_sim::{Cluster, Options, estimate};

const RUN: &str = "[model]\npreset = \"llama-test\"\nvocab = 257\n[layout]\ndata = 2\ntensor = 2\npipe = 2\nzero = 1\n";

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    timed(|| {
        let Ok(cluster) = Cluster::parse(&text) else { return };
        let config = Config::parse(RUN, &[]);
        let Ok(plan) = Plan::resolve(&config, &cluster.environment(config.ranks(), None)) else {
            return;
        };
        let step = estimate(&plan, &cluster, &Options::default()).step_s;
        assert!(step.is_finite() && step > 0.0, "a step takes {step} s");
    });
});
