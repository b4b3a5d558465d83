//! Measured traffic equals the predicted traffic between processes that are connected by TCP, each acting as a host.

use lockstep_comm::{
    CollectiveShape, LocalLinks, Options, Traffic, World, choose, predict_traffic,
};
use lockstep_launch::{LaunchSpec, OutputMode, identity, launch};
use lockstep_parallel::Groups;
use lockstep_plan::PlannedCall;
use lockstep_trainer::planned_traffic;

use crate::cuts::plan;
use crate::traffic::{MEASURED_STEPS, compare, kind, measured};

const TEST: &str = "hosts::traffic_between_hosts_matches_the_plan";
const WORLD: &str = "LOCKSTEP_TEST_WORLD";

const ON_TWO: &[&str] = &[
    "gpt2 data=2 comm.bucket_mb=0.05",
    "llama data=2 comm.bucket_mb=0.2 precision.gradients=bf16",
    "gpt2 data=2 comm.compression=int8 comm.bucket_mb=0.05",
    "gpt2 data=2 comm.compression=topk:0.01 comm.bucket_mb=0.05",
    "gpt2 data=2 zero=1",
    "llama data=2 zero=2 comm.overlap=false",
    "llama data=2 zero=3 precision.compute=bf16",
    "gpt2 tensor=2",
    "gpt2 tensor=2 sequence=true comm.overlap=false",
    "gpt2 tensor=2 sequence=true comm.overlap=true",
    "llama context=2",
    "gpt2 context=2 context_kind=ulysses",
    "gpt2 pipe=2",
    "moe data=2 expert=2",
];

const ON_FOUR: &[&str] = &[
    "gpt2 data=4 comm.bucket_mb=0.2",
    "gpt2 data=4 zero=2 shard=2",
    "llama data=2 tensor=2 zero=1",
    "llama tensor=4 sequence=true comm.overlap=true precision.compute=bf16 train.micro_batch=3",
    "llama tensor=2 pipe=2 sequence=true comm.overlap=true schedule=zb-h1 model.tied=true",
    "gpt2 data=2 context=2 zero=3",
];

#[test]
fn traffic_between_hosts_matches_the_plan() {
    match std::env::var(WORLD) {
        Ok(ranks) => run_as_host(if ranks == "2" { ON_TWO } else { ON_FOUR }),
        Err(_) => [2, 4].into_iter().for_each(start),
    }
}

/// Runs this test in one process per rank.
fn start(ranks: usize) {
    let program = std::env::current_exe().expect("this binary has a path").into_os_string();
    let command = [program].into_iter().chain([TEST, "--exact", "--nocapture"].map(Into::into));
    let logs = std::env::temp_dir().join(format!("lockstep-hosts-{}-{ranks}", std::process::id()));
    let mut spec = LaunchSpec::local(ranks, command.collect(), logs.clone());
    spec.output = OutputMode::None;
    spec.extra_env = vec![(WORLD.into(), ranks.to_string()), ("RUST_BACKTRACE".into(), "0".into())];
    let outcome = launch(&spec).expect("the ranks start");
    let report = outcome.failure.map(|failure| failure.to_string()).unwrap_or_default();
    assert_eq!(outcome.exit_code, 0, "on {ranks}: {report}");
    let _ = std::fs::remove_dir_all(logs);
}

fn run_as_host(layouts: &[&str]) {
    let identity = identity::from_process_env().expect("the launcher sets the environment");
    let options = Options { local: LocalLinks::Tcp, ..Options::default() };
    let world = World::join(&identity, &options).expect("the world forms");
    for words in layouts {
        let plan = plan(words);
        let groups = Groups::new(&world, &plan.mesh(), false).unwrap();
        let of = |call: &PlannedCall, me| between_hosts(&world, &groups, call, me);
        let measured = measured(&plan, &world);
        compare(words, world.rank(), &measured, None, of);
        let planned = |step| planned_traffic(&plan, &world, step).sent;
        let sent: u64 = measured.values().map(|traffic| traffic.bytes).sum();
        assert_eq!(sent, MEASURED_STEPS.map(planned).sum::<u64>(), "{words}: all groups");
    }
    // All ranks leave together, so that none reports another as lost.
    world.barrier().unwrap();
    drop(world);
    std::process::exit(0);
}

/// Traffic of one collective, with the algorithm that its group chooses.
fn between_hosts(world: &World, groups: &Groups, call: &PlannedCall, me: usize) -> Traffic {
    let PlannedCall { members, count, width, .. } = *call;
    let Some(kind) = kind(call.collective) else {
        return Traffic { messages: 1, bytes: (count * width) as u64 };
    };
    let group = call.kind.map_or(world.group(), |kind| groups.group(kind));
    assert_eq!(group.size(), members, "{call:?}");
    let shape = CollectiveShape { kind, count, width, root: 0, hosts: group.hosts() };
    assert!(
        group.hosts().iter().any(|host| *host != group.hosts()[0]),
        "all ranks are on one host"
    );
    let algo = choose(&shape, &group.link_costs());
    predict_traffic(&shape, algo, me).expect("this collective has a traffic formula")
}
