//! Places the ranks of a host: which GPU each uses, on which cores, and which network cards are close.

use super::Topology;

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub local_rank: usize,
    /// PCI address of its GPU.
    pub gpu: String,
    /// NUMA node of the GPU, if known.
    pub node: Option<usize>,
    /// Cores of the node, divided among the ranks on it. Empty if the node is unknown.
    pub cores: Vec<usize>,
    /// Network cards that are closest to the GPU.
    pub nics: Vec<String>,
}

/// Places `ranks` ranks on the GPUs with these PCI addresses, in order; ranks beyond their number share them. `allowed`
/// are the cores that the process may use, e.g. those of its container.
pub fn place(
    topology: &Topology,
    gpus: &[String],
    ranks: usize,
    allowed: &[usize],
) -> Vec<Placement> {
    let Some(count) = std::num::NonZeroUsize::new(gpus.len()) else { return Vec::new() };
    let found = |rank: usize| {
        let address = &gpus[rank % count];
        topology.gpus.iter().position(|gpu| gpu.address == *address)
    };
    let node_of = |rank: usize| found(rank).and_then(|gpu| topology.gpus[gpu].node);
    let placed = |local_rank: usize| {
        let node = node_of(local_rank);
        let nics = found(local_rank).map_or(Vec::new(), |gpu| topology.nearest_nics(gpu));
        // The ranks of a node in order; each gets an equal part of its cores.
        let on_node: Vec<usize> =
            (0..ranks).filter(|other| node.is_some() && node_of(*other) == node).collect();
        let cores = topology.nodes.iter().find(|other| Some(other.id) == node);
        let cores: Vec<usize> = cores.map_or(Vec::new(), |node| {
            node.cores.iter().copied().filter(|core| allowed.contains(core)).collect()
        });
        let position = on_node.iter().position(|other| *other == local_rank).unwrap_or(0);
        Placement {
            local_rank,
            gpu: gpus[local_rank % count].clone(),
            node,
            cores: part(&cores, on_node.len().max(1), position),
            nics: nics.into_iter().map(|nic| nic.name.clone()).collect(),
        }
    };
    (0..ranks).map(placed).collect()
}

/// Part `index` of `parts` equal parts. All of them if there are fewer cores than parts.
fn part(cores: &[usize], parts: usize, index: usize) -> Vec<usize> {
    if cores.len() < parts {
        return cores.to_vec();
    }
    cores[index * cores.len() / parts..(index + 1) * cores.len() / parts].to_vec()
}
