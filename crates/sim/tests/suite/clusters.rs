//! Cluster descriptions and the cost of collectives.

use crate::errors::mean_error;
use crate::tables::{plan, read};
use lockstep_comm::{
    Algo, CollectiveShape, LinkCost, LinkCosts, choose, predict_seconds, predict_traffic,
};
use lockstep_plan::{Collective, Phase};
use lockstep_sim::{
    Cluster, Flow, GroupPlacement, Options, calibrate, collective_seconds, estimate,
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
    let unknown = Cluster::parse("name = \"x\"\naccelerator = \"h10\"\nper_host = 8\nlinks = []\n")
        .unwrap_err();
    assert!(unknown.contains("unknown accelerator `h10`"), "{unknown}");
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
    let seconds = |rails, over, spread| {
        collective_seconds(
            &Cluster::parse(&text(rails, over)).unwrap(),
            spread,
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
