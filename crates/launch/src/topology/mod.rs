//! The hardware of a host: NUMA nodes, GPUs, network cards and what connects them. Read from sysfs and NVML; knows
//! nothing about models.

mod bind;
mod place;
mod read;
mod report;

pub use bind::{allowed_cores, bind_to};
pub use place::{Placement, place};
pub use report::report;

use lockstep_cuda::nvlink::NvLink;

/// The hardware of one host.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Topology {
    pub nodes: Vec<NumaNode>,
    /// In the order of their PCI addresses.
    pub gpus: Vec<PciGpu>,
    pub nics: Vec<Nic>,
    pub nvlinks: Vec<NvLink>,
}

/// A NUMA node and its cores.
#[derive(Clone, Debug, PartialEq)]
pub struct NumaNode {
    pub id: usize,
    pub cores: Vec<usize>,
}

/// A GPU on the PCI bus.
#[derive(Clone, Debug, PartialEq)]
pub struct PciGpu {
    /// PCI address, `0000:1b:00.0`.
    pub address: String,
    /// None if the system does not tell.
    pub node: Option<usize>,
    /// Bridges from the root to the device.
    pub path: Vec<String>,
    /// GB/s of the slot in each direction.
    pub pcie_gbs: Option<f64>,
}

/// A network card with a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Nic {
    pub name: String,
    pub kind: NicKind,
    /// None for cards that are not on the PCI bus.
    pub node: Option<usize>,
    pub path: Vec<String>,
    /// GB/s of the link in each direction, if the system tells.
    pub gbs: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicKind {
    Ethernet,
    InfiniBand,
}

/// How two devices of a host are connected, from fastest to slowest. The names in parentheses are those of
/// `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Connection {
    /// NVLink, directly or through switches (NV#).
    NvLink,
    /// A PCIe switch (PIX, PXB).
    PcieSwitch,
    /// The host bridge of a NUMA node (PHB, NODE).
    Node,
    /// The link between NUMA nodes (SYS).
    System,
}

impl Connection {
    pub fn name(self) -> &'static str {
        match self {
            Connection::NvLink => "NVLink",
            Connection::PcieSwitch => "PCIe switch",
            Connection::Node => "same NUMA node",
            Connection::System => "other NUMA node",
        }
    }
}

impl Topology {
    /// The hardware of this host.
    pub fn of_this_host() -> Topology {
        let mut topology = read::read(std::path::Path::new("/sys"));
        if !topology.gpus.is_empty() {
            topology.nvlinks = lockstep_cuda::nvlink::nvlinks();
        }
        topology
    }

    /// The hardware described by a sysfs tree, without NVLink.
    pub fn of_sysfs(root: &std::path::Path) -> Topology {
        read::read(root)
    }

    /// The connection between two GPUs, and its GB/s in each direction if known.
    pub fn between(&self, first: usize, second: usize) -> (Connection, Option<f64>) {
        let (a, b) = (&self.gpus[first], &self.gpus[second]);
        let links = |gpu: &PciGpu| -> Vec<&NvLink> {
            self.nvlinks.iter().filter(|link| link.gpu == gpu.address).collect()
        };
        let (from, to) = (links(a), links(b));
        // Direct links, or all links if both reach the same switches.
        let direct: f64 =
            from.iter().filter(|link| link.remote == b.address).map(|link| link.gbs).sum();
        let switched: f64 = from
            .iter()
            .filter(|link| to.iter().any(|other| other.remote == link.remote))
            .map(|link| link.gbs)
            .sum();
        let nvlink = direct + switched;
        if nvlink > 0.0 {
            return (Connection::NvLink, Some(nvlink));
        }
        let slot = a.pcie_gbs.zip(b.pcie_gbs).map(|(a, b)| a.min(b));
        (connection(&a.path, a.node, &b.path, b.node), slot)
    }

    /// Network cards that are closest to a GPU.
    pub fn nearest_nics(&self, gpu: usize) -> Vec<&Nic> {
        let gpu = &self.gpus[gpu];
        let far = |nic: &Nic| connection(&gpu.path, gpu.node, &nic.path, nic.node);
        let usable = || self.nics.iter().filter(|nic| nic.node.is_some());
        let Some(nearest) = usable().map(far).min() else { return Vec::new() };
        usable().filter(|nic| far(nic) == nearest).collect()
    }

    /// GB/s of all network cards together, in each direction. InfiniBand counts alone if there is any.
    pub fn network_gbs(&self) -> Option<f64> {
        let fast = |nic: &&Nic| nic.kind == NicKind::InfiniBand;
        let any = self.nics.iter().any(|nic| fast(&nic));
        let rates: Vec<f64> =
            self.nics.iter().filter(|nic| fast(nic) == any).filter_map(|nic| nic.gbs).collect();
        (!rates.is_empty()).then(|| rates.iter().sum())
    }
}

/// The connection between two devices on the PCI bus.
fn connection(
    a: &[String],
    a_node: Option<usize>,
    b: &[String],
    b_node: Option<usize>,
) -> Connection {
    let shared = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    // The first element is the host bridge, the second a root port of it.
    match shared {
        2.. => Connection::PcieSwitch,
        1 => Connection::Node,
        0 if a_node.is_some() && a_node == b_node => Connection::Node,
        0 => Connection::System,
    }
}
