//! The hardware of a host in a few lines.

use super::{NicKind, Topology};

/// Lines about GPUs, network cards and how GPUs are connected. Empty without GPUs.
pub fn report(topology: &Topology) -> Vec<String> {
    if topology.gpus.is_empty() {
        return Vec::new();
    }
    let gbs = |gbs: Option<f64>| gbs.map_or(String::new(), |gbs| format!(", {gbs:.0} GB/s"));
    let on = |node: Option<usize>| node.map_or("no".into(), |node: usize| node.to_string());
    let mut lines = Vec::new();
    for (index, gpu) in topology.gpus.iter().enumerate() {
        let near: Vec<&str> =
            topology.nearest_nics(index).iter().map(|nic| nic.name.as_str()).collect();
        let near = if near.is_empty() { "none".into() } else { near.join(", ") };
        lines.push(format!(
            "GPU at {}: NUMA node {}, PCIe{}; nearest network cards: {near}",
            gpu.address,
            on(gpu.node),
            gbs(gpu.pcie_gbs)
        ));
    }
    for nic in &topology.nics {
        let kind = match nic.kind {
            NicKind::Ethernet => "Ethernet",
            NicKind::InfiniBand => "InfiniBand",
        };
        lines.push(format!(
            "network card {}: {kind}, NUMA node {}{}",
            nic.name,
            on(nic.node),
            gbs(nic.gbs)
        ));
    }
    // One line per kind of connection, with the number of pairs.
    let count = topology.gpus.len();
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for (first, second) in (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))) {
        let (kind, rate) = topology.between(first, second);
        let text = format!("{}{}", kind.name(), gbs(rate));
        match kinds.iter_mut().find(|(known, _)| *known == text) {
            Some((_, pairs)) => *pairs += 1,
            None => kinds.push((text, 1)),
        }
    }
    lines.extend(kinds.into_iter().map(|(text, pairs)| format!("{pairs} pairs of GPUs: {text}")));
    lines
}
