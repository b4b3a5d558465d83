//! Cluster descriptions and the cost of collectives.

use crate::errors::mean_error;
use crate::tables::{plan, read};
use lockstep_comm::{
    Algo, CollectiveShape, LinkCost, LinkCosts, choose, predict_seconds, predict_traffic,
};
use lockstep_plan::model::Family;
use lockstep_plan::{Collective, Dtype, Phase};
use lockstep_sim::{
    Cluster, Curve, Efficiency, Flow, GroupPlacement, Options, Software, calibrate,
    collective_seconds, estimate,
};

#[test]
fn built_in_clusters_are_valid() {
    for name in Cluster::names() {
        let cluster = Cluster::built_in(&name).unwrap();
        assert_eq!(cluster.check(), Ok(()), "{name}");
        assert_eq!(cluster.name, name);
    }
    let needed = ["a100-40", "a100-80", "h100", "h200", "b200", "gb200", "ethernet"];
    assert!(needed.iter().all(|name| Cluster::names().iter().any(|known| known == name)));
}

#[test]
fn the_cluster_of_the_readme_parses() {
    let readme = include_str!("../../README.md");
    let (_, rest) = readme.split_once("```toml\n").unwrap();
    let cluster = Cluster::parse(rest.split_once("```").unwrap().0).unwrap();
    assert_eq!((cluster.links.len(), cluster.of_rank(17).0, cluster.of_rank(16).1), (3, 0.8, 1.0));
}

#[test]
fn errors_suggest_a_fix() {
    let with = |links: &str| {
        Cluster::parse(&format!("name = \"x\"\naccelerator = \"h100\"\nper_host = 8\n{links}"))
    };
    let link = "start_us = 1.0\nhop_us = 1.0\n";
    let wrong = with(&format!("[[links]]\nname = \"wire\"\nspan = 8\nbandwidth_gbs = 1.0\n{link}"));
    assert_eq!(
        wrong.unwrap_err(),
        "the last link, wire, has span=8; remove its span so that it connects all ranks"
    );
    let wrong = with(&format!("[[links]]\nname = \"wire\"\nbandwidth_gbs = 0.0\n{link}"));
    assert_eq!(wrong.unwrap_err(), "link wire: bandwidth_gbs must be positive (got 0)");
}

#[test]
fn errors_name_what_is_wrong_in_an_accelerator() {
    let error = |accelerator: &str| {
        let text = format!("name = \"x\"\naccelerator = {accelerator}\nper_host = 8\nlinks = []\n");
        Cluster::parse(&text).unwrap_err()
    };
    let unknown = error("\"h10\"");
    assert!(
        unknown.contains("line 2") && unknown.contains("unknown accelerator `h10`"),
        "{unknown}"
    );
    assert!(unknown.contains("h100-96, h200"), "{unknown}");
    let misspelled = error("{ name = \"x\", peek = 1.0 }");
    assert!(misspelled.contains("unknown field `peek`"), "{misspelled}");
    let text = error("{ name = \"x\", peak = { f32 = 1.0, bf16 = \"fast\" } }");
    assert!(text.contains("string \"fast\"") && text.contains("`peak.bf16`"), "{text}");
    let number = error("3");
    assert!(number.contains("must be a table or the name of a built-in one (got 3)"), "{number}");
}

/// Every number of a description is checked: none may make an estimate infinite, negative or not a number.
#[test]
fn invalid_cluster_files_are_rejected() {
    let valid = "name = \"x\"\naccelerator = \"h100\"\nper_host = 8\nranks = 32\n\
                 [[links]]\nname = \"near\"\nspan = 8\nstart_us = 30.0\nhop_us = 2.0\nbandwidth_gbs = 370.0\n\
                 [[links]]\nname = \"far\"\nstart_us = 30.0\nhop_us = 14.0\nbandwidth_gbs = 45.0\nrails = 8\n\
                 oversubscription = 1.0\n[[differs]]\nhosts = [3]\nranks = [9]\ncompute = 0.9\nlink = 0.9\nmemory_gib = 70.0\n";
    assert_eq!(Cluster::parse(valid).map(|_| ()), Ok(()));
    #[rustfmt::skip]
    let cases = [
        ("hop_us = 14.0", "hop_us = nan", "link far: hop_us must be between 0 and 1e12 (got NaN)"),
        ("hop_us = 14.0", "hop_us = inf", "link far: hop_us must be between 0 and 1e12 (got inf)"),
        ("hop_us = 2.0", "hop_us = -2.0", "link near: hop_us must be between 0 and 1e12 (got -2)"),
        ("start_us = 30.0", "start_us = nan", "link near: start_us must be between 0 and 1e12 (got NaN)"),
        ("bandwidth_gbs = 45.0", "bandwidth_gbs = inf", "link far: bandwidth_gbs must be between 1e-9 and 1e12 (got inf)"),
        ("oversubscription = 1.0", "oversubscription = 0.0", "link far: oversubscription must be positive (got 0)"),
        ("oversubscription = 1.0", "oversubscription = nan", "link far: oversubscription must be positive (got NaN)"),
        ("oversubscription = 1.0", "oversubscription = -1.0", "link far: oversubscription must be positive (got -1)"),
        ("rails = 8", "rails = 0", "link far: rails must be at least 1 (got 0)"),
        ("span = 8", "span = 0", "link near: span must be above 0, the span of the link before it, and at most 16777216 (got 0)"),
        ("per_host = 8", "per_host = 0", "per_host must be at least 1 (got 0)"),
        ("ranks = 32", "ranks = 0", "ranks must be at least 1 (got 0)"),
        ("per_host = 8", "per_host = 8\ncores = 0", "cores must be at least 1 (got 0)"),
        ("per_host = 8", "per_host = 8\nskew = [[1.0, nan]]", "skew: the value at 1 must be positive (got NaN)"),
        ("compute = 0.9", "compute = 0.0", "differs: compute must be positive (got 0)"),
        ("compute = 0.9", "compute = nan", "differs: compute must be positive (got NaN)"),
        ("compute = 0.9", "compute = -1.0", "differs: compute must be positive (got -1)"),
        ("link = 0.9", "link = 0.0", "differs: link must be positive (got 0)"),
        ("memory_gib = 70.0", "memory_gib = -1.0", "differs: memory_gib must be positive (got -1)"),
        ("hosts = [3]\nranks = [9]", "", "differs: no hosts or ranks; list those that differ, e.g. hosts = [3]"),
        ("hosts = [3]", "hosts = [4]", "differs: host 4 does not exist: 32 ranks are on hosts 0 to 3; correct the number, or set `ranks` to the size of the cluster"),
        ("ranks = [9]", "ranks = [32]", "differs: rank 32 does not exist: the ranks are 0 to 31; correct the number, or set `ranks` to the size of the cluster"),
    ];
    for (from, to, error) in cases {
        let text = valid.replacen(from, to, 1);
        assert_ne!(text, valid, "{from}");
        assert_eq!(Cluster::parse(&text).map(|_| ()), Err(error.into()), "{to}");
    }
    // All mistakes are reported together.
    let several = valid.replace("rails = 8", "rails = 0").replace("link = 0.9", "link = nan");
    assert_eq!(Cluster::parse(&several).unwrap_err().lines().count(), 2);
    // Without `ranks` the size is that of the run.
    let open = Cluster::parse(&valid.replacen("ranks = 32\n", "", 1)).unwrap();
    assert!(open.check_size(32).is_ok() && open.check_size(16).unwrap_err().contains("host 3"));
}

/// The same for every number of an accelerator.
#[test]
fn invalid_accelerators_are_rejected() {
    let valid = Cluster::built_in("h100").unwrap();
    let text = toml::to_string(&valid).unwrap();
    let mut changed = 0;
    for (number, line) in text.lines().enumerate() {
        let Some((key, value)) = line.split_once(" = ") else { continue };
        if value.parse::<f64>().is_err() {
            continue;
        }
        for wrong in ["nan", "-1.0", "1e300"] {
            let line = format!("{key} = {wrong}");
            let lines = text.lines().enumerate();
            let lines: Vec<&str> =
                lines.map(|(at, old)| if at == number { line.as_str() } else { old }).collect();
            assert!(Cluster::parse(&lines.join("\n")).is_err(), "{line} is accepted");
        }
        changed += 1;
    }
    assert!(changed > 20, "only {changed} numbers");
}

#[test]
fn suggestions_differ_from_what_was_typed() {
    for typed in ["h100-0", "h10-0", "a100-64", "a100-80-0", "h100-x", "h200-999999999"] {
        let error = Cluster::named(typed).unwrap_err();
        assert!(!error.contains(&format!("did you mean `{typed}`")), "{error}");
    }
    assert_eq!(Cluster::named("h100-0").unwrap_err(), "`h100-0`: ranks must be at least 1 (got 0)");
    let error = Cluster::named("a100-64").unwrap_err();
    assert!(error.contains("did you mean `a100-40-64`?"), "{error}");
}

/// FP8 adds copies of the weights, or shrinks what only matmuls read. Without FP8 units nothing changes.
#[test]
fn fp8_changes_memory_where_it_is_supported() {
    let run = "[model]\npreset = \"llama3-8b\"\nseq = 4096\n[train]\nglobal_batch = 8\nmicro_batch = 1\n\
               [layout]\ntensor = 8\n[precision]\ncompute = \"bf16\"\n";
    let run = plan(run, 8);
    let memory = |cluster: &str, software: Software, fp8: bool| {
        let cluster = Cluster::built_in(cluster).unwrap();
        let options = Options { fp8, software, ..Options::default() };
        estimate(&run, &cluster, &options).stages[0].memory
    };
    let [bf16, fp8] = [false, true].map(|fp8| memory("h100", Software::megatron_core(), fp8));
    assert!(fp8.activations < 0.8 * bf16.activations, "{fp8:?} {bf16:?}");
    let [bf16, fp8] = [false, true].map(|fp8| memory("h100", Software::lockstep(), fp8));
    let layers = run.model.param_count() - 2 * run.model.vocab * run.model.dim;
    let copies = (fp8.buffers - bf16.buffers) / (2.0 * layers as f64 / 8.0);
    assert!((copies - 1.0).abs() < 1e-3, "{copies}");
    let [bf16, fp8] = [false, true].map(|fp8| memory("a100-80", Software::megatron_core(), fp8));
    assert_eq!(bf16, fp8);
    let [bf16, fp8] = [false, true].map(|fp8| memory("h100", Software::torchtitan(), fp8));
    assert_eq!(bf16, fp8);
}

/// NCCL's all-reduce inside a node of A100s, from 1 MB to 1 GB, as vTrain's authors measured it.
#[test]
fn all_reduces_of_a_node() {
    let cluster = Cluster::built_in("a100-80").unwrap();
    let rows: Vec<(String, f64, f64)> =
        read(include_str!("../measured/vtrain_a100_nccl_allreduce.csv"))
            .iter()
            .map(|row| {
                let (members, bytes) = (row.count("n_gpus"), row.number("size_B").unwrap());
                let predicted = collective_seconds(
                    &cluster,
                    GroupPlacement { members, stride: 1 },
                    Collective::AllReduce,
                    bytes,
                );
                (
                    format!("{members} of {bytes}"),
                    1e6 * predicted,
                    row.number("time_us_outofplace").unwrap(),
                )
            })
            .collect();
    assert!(mean_error("all-reduce on A100s, µs", &rows) < 0.03);
}

/// With the Lockstep engine, costs are those of `comm`.
#[test]
fn lockstep_engine_uses_the_formulas_of_comm() {
    let cluster = Cluster::built_in("ethernet").unwrap();
    let constants = LinkCosts {
        local: LinkCost { latency: 1e-6, bandwidth: 8e9 },
        remote: LinkCost { latency: 20e-6, bandwidth: 1.1e9 },
    };
    let kinds = [
        (Collective::AllReduce, Collective::AllReduce),
        (Collective::AllGather, Collective::AllGather),
        (Collective::ReduceScatter, Collective::ReduceScatter),
        (Collective::AllToAll, Collective::AllToAll),
    ];
    for members in [2, 3, 4, 8] {
        for stride in [1, 4] {
            let hosts: Vec<usize> = (0..members).map(|member| member * stride / 4).collect();
            for (collective, kind) in kinds {
                for bytes in [64, 1 << 20] {
                    let shape =
                        CollectiveShape { kind, count: bytes, width: 1, root: 0, hosts: &hosts };
                    let comms = predict_seconds(&shape, choose(&shape, &constants), &constants);
                    let ours = collective_seconds(
                        &cluster,
                        GroupPlacement { members, stride },
                        collective,
                        bytes as f64,
                    );
                    assert!(
                        (ours / comms - 1.0).abs() < 1e-9,
                        "{collective:?} of {bytes} among {members}, {stride} apart"
                    );
                }
            }
        }
    }
}

/// `Flow::sent` equals the bytes sent by the rings of `comm`.
#[test]
fn flows_match_ring_traffic() {
    let hosts: Vec<usize> = (0..8).collect();
    for (collective, kind) in [
        (Collective::AllReduce, Collective::AllReduce),
        (Collective::AllGather, Collective::AllGather),
        (Collective::ReduceScatter, Collective::ReduceScatter),
    ] {
        let shape = CollectiveShape { kind, count: 8 << 10, width: 1, root: 0, hosts: &hosts };
        let flow = Flow {
            kind: None,
            members: 8,
            collective,
            phase: Phase::Backward,
            bytes: (8 << 10) as f64,
            times: 1.0,
            link: 0,
            seconds: 0.0,
        };
        assert_eq!(
            predict_traffic(&shape, Algo::Ring, 3).unwrap().bytes as f64,
            flow.sent(),
            "{collective:?}"
        );
    }
}

/// Ranks on one host share its cores: four ranks are not faster than one rank with all threads.
#[test]
fn ranks_share_cores() {
    let cluster = Cluster::built_in("cpu").unwrap();
    let step = |ranks: usize, threads: usize| {
        let text = format!(
            "[model]\npreset = \"small\"\n[train]\nthreads = {threads}\n[layout]\ndata = {ranks}\n"
        );
        estimate(&plan(&text, ranks), &cluster, &Options::default()).step_s
    };
    let (one, half, two, four) = (step(1, 2), step(1, 1), step(2, 1), step(4, 1));
    assert!(half > 1.5 * one && half < 2.0 * one);
    assert!(two > 0.95 * one && two < 1.2 * one, "{one} {two}");
    assert!(four > 0.95 * one && four < 1.4 * one, "{one} {four}");
}

#[test]
fn a_measured_step_calibrates() {
    let cluster = Cluster::built_in("cpu").unwrap();
    let options = Options::default();
    let small = plan("[model]\npreset = \"small\"\n", 1);
    for seconds in [0.5, 3.0] {
        let ours = calibrate(&cluster, &options, &[(&small, seconds)]);
        assert!((estimate(&small, &ours, &options).step_s / seconds - 1.0).abs() < 1e-6);
    }
}

/// On slower cores everything takes longer, also the gaps between operations: the gain of a change does not depend on
/// how busy the cores were.
#[test]
fn calibration_keeps_the_share_of_fixed_costs() {
    let mut cluster = Cluster::built_in("cpu").unwrap();
    cluster.accelerator.kernel_gap_us = 50.0;
    let mut efficiency = Efficiency::default();
    efficiency.of_mut(Dtype::F32, Family::Llama).attention = Curve(vec![(100.0, 0.05)]);
    cluster.accelerator.efficiency = Some(efficiency);
    let options = Options::default();
    let [small, large] = [1, 8].map(|micro| {
        let text = format!(
            "[model]\nfamily = \"llama\"\ndim = 128\nlayers = 4\nheads = 4\nseq = 128\nvocab = 256\n\
             [train]\nglobal_batch = 8\nmicro_batch = {micro}\n"
        );
        plan(&text, 1)
    });
    let seconds = |cluster: &Cluster, plan| estimate(plan, cluster, &options).step_s;
    let before = seconds(&cluster, &small);
    let gain = |cluster: &Cluster| 1.0 - seconds(cluster, &large) / seconds(cluster, &small);
    let expected = gain(&cluster);
    assert!(expected > 0.05, "{expected}");
    for slower in [0.5, 3.0] {
        let ours = calibrate(&cluster, &options, &[(&small, slower * before)]);
        assert!((gain(&ours) - expected).abs() < 1e-6, "{} {expected}", gain(&ours));
    }
}

/// Ranks share the network cards of a host: two ranks with one rail get half of it each.
#[test]
fn ranks_share_rails_and_up_links() {
    let text = |rails: usize, over: f64| {
        format!(
            "name = \"x\"\naccelerator = \"h100\"\nper_host = 2\n\
             [[links]]\nname = \"inside\"\nspan = 2\nstart_us = 0.0\nhop_us = 0.0\nbandwidth_gbs = 100.0\n\
             [[links]]\nname = \"leaf\"\nspan = 8\nstart_us = 0.0\nhop_us = 0.0\nbandwidth_gbs = 10.0\nrails = {rails}\n\
             [[links]]\nname = \"spine\"\nstart_us = 0.0\nhop_us = 0.0\nbandwidth_gbs = 10.0\nrails = {rails}\noversubscription = {over:?}\n"
        )
    };
    let seconds = |rails, over, placement| {
        collective_seconds(
            &Cluster::parse(&text(rails, over)).unwrap(),
            placement,
            Collective::AllGather,
            1e9,
        )
    };
    // Four hosts of one leaf, one rank each: 3/4 GB at 10 GB/s, or at half the bandwidth.
    let four = GroupPlacement { members: 4, stride: 2 };
    assert!((seconds(2, 1.0, four) - 0.075).abs() < 1e-9);
    assert!((seconds(1, 1.0, four) - 0.15).abs() < 1e-9);
    // Two leaves of four hosts: traffic across the spine uses four up-links with a quarter of the bandwidth each.
    let eight = GroupPlacement { members: 8, stride: 2 };
    assert!((seconds(2, 8.0, eight) - 0.875 / (4.0 * 1.25)).abs() < 1e-9);
    // Both ranks of every host in one ring: they use both rails for the same bytes.
    let all = GroupPlacement { members: 8, stride: 1 };
    assert!((seconds(2, 1.0, all) - 0.875 / 20.0).abs() < 1e-9);
}

/// All-reduces of threads, measured on an H200: ranks, MiB, and microseconds.
#[test]
fn collectives_in_the_memory_of_an_h200_take_as_long_as_measured() {
    let one = Cluster::parse(include_str!("../measured/h200.toml")).unwrap();
    let rows = [
        (2, 1.0 / 256.0, 7.0),
        (4, 1.0 / 256.0, 11.0),
        (8, 1.0 / 256.0, 19.0),
        (2, 1.0, 8.0),
        (4, 1.0, 12.0),
        (8, 1.0, 22.0),
        (2, 16.0, 21.0),
        (8, 16.0, 72.0),
        (2, 64.0, 72.0),
        (8, 64.0, 279.0),
        (2, 256.0, 278.0),
        (4, 256.0, 550.0),
        (8, 256.0, 1090.0),
    ];
    for (ranks, mib, measured) in rows {
        let cluster = one.shared_by(ranks, false);
        let group = GroupPlacement { members: ranks, stride: 1 };
        let bytes = mib * (1 << 20) as f64;
        let predicted = 1e6 * collective_seconds(&cluster, group, Collective::AllReduce, bytes);
        let error = predicted / measured - 1.0;
        println!("{ranks} ranks, {mib} MiB: {predicted:.0} µs, measured {measured} ({error:+.2})");
        assert!(error.abs() < 0.16, "{ranks} ranks, {mib} MiB: {predicted} µs, not {measured}");
    }
}

/// Half of the ranks do not get more than their share, and messages between processes are copied twice.
#[test]
fn ranks_that_share_an_accelerator_share_its_memory() {
    let one = Cluster::built_in("h200").unwrap();
    let seconds = |processes: bool, members: usize, collective: Collective| {
        let group = GroupPlacement { members, stride: 1 };
        collective_seconds(&one.shared_by(4, processes), group, collective, 1e12)
    };
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-3, "{a} is not {b}");
    let bandwidth = one.accelerator.bandwidth_gbs * 1e9 * one.accelerator.stream;
    // Every member's buffer is read and written.
    near(seconds(false, 4, Collective::AllReduce), 8e12 / bandwidth);
    // Three members copy their buffers in and out.
    near(seconds(true, 4, Collective::AllReduce), 20e12 / bandwidth);
    near(seconds(false, 4, Collective::AllGather), 5e12 / bandwidth);
    near(seconds(true, 4, Collective::ReduceScatter), (5.0 + 3.0 * 2.5) * 1e12 / bandwidth);
    // Two groups of two at the same time.
    near(seconds(false, 2, Collective::AllReduce), 8e12 / bandwidth);
    near(seconds(false, 4, Collective::SendRecv), 2e12 / bandwidth);
    near(seconds(true, 4, Collective::SendRecv), 4e12 / bandwidth);
}

#[test]
fn descriptions_of_a_shared_accelerator_are_checked() {
    let shared = Cluster::built_in("h200").unwrap().shared_by(2, true);
    assert_eq!(shared.check(), Ok(()));
    let text = toml::to_string(&shared).unwrap();
    assert!(text.contains("engine = \"staged\""));
    assert_eq!(Cluster::parse(&text).as_ref(), Ok(&shared));
    let apart = Cluster { ranks: Some(4), ..shared.clone() };
    assert!(apart.check().unwrap_err().contains("set per_host=4"));
    let cores = Cluster { cores: Some(8), ..shared };
    assert!(cores.check().unwrap_err().contains("not both"));
}
