//! The topology of sample hosts: sysfs trees with the files and links of real machines.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use lockstep_cuda::nvlink::NvLink;
use lockstep_launch::topology::{Connection, NicKind, Topology, place, report};

/// A sysfs tree that is removed when dropped.
struct Sysfs(PathBuf);

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Sysfs {
    /// An empty tree of its own for each call: tests of one process run at the same time.
    fn new() -> Sysfs {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = std::env::temp_dir().join(format!("lockstep-sys-{process}-{number}"));
        let _ = fs::remove_dir_all(&root);
        for folder in ["bus/pci/devices", "class/net", "class/infiniband", "devices/system/node"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        Sysfs(root)
    }

    fn write(&self, folder: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = self.0.join(folder).join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    fn node(&self, id: usize, cores: &str) {
        let folder = format!("devices/system/node/node{id}");
        self.write(Path::new(&folder), &[("cpulist", cores)]);
    }

    /// A PCI device below some bridges, e.g. `pci0000:15/0000:15:01.0`.
    fn device(&self, bridges: &str, address: &str, node: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = Path::new("devices").join(bridges).join(address);
        self.write(&folder, &[("numa_node", node)]);
        self.write(&folder, files);
        let link = self.0.join("bus/pci/devices").join(address);
        symlink(self.0.join(&folder), link).unwrap();
        folder
    }

    fn gpu(&self, bridges: &str, address: &str, node: &str) {
        let files = [
            ("vendor", "0x10de"),
            ("class", "0x030200"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
        ];
        self.device(bridges, address, node, &files);
    }

    /// An InfiniBand card with its network interface.
    fn infiniband(&self, bridges: &str, address: &str, node: &str, number: usize) {
        let device = self.device(bridges, address, node, &[("vendor", "0x15b3")]);
        let card = PathBuf::from(format!("class/infiniband/mlx5_{number}"));
        let port = [("ports/1/state", "4: ACTIVE"), ("ports/1/rate", "400 Gb/sec (4X NDR)")];
        self.write(&card, &port);
        symlink(self.0.join(&device), self.0.join(&card).join("device")).unwrap();
        let interface = PathBuf::from(format!("class/net/ibs{number}"));
        self.write(&interface, &[("operstate", "up"), ("speed", "400000")]);
        symlink(self.0.join(&device), self.0.join(&interface).join("device")).unwrap();
    }

    fn ethernet(&self, name: &str, speed: &str, state: &str) {
        let interface = PathBuf::from(format!("class/net/{name}"));
        self.write(&interface, &[("operstate", state), ("speed", speed)]);
    }
}

const GPUS: [&str; 8] = ["1b", "43", "52", "61", "9d", "c3", "d1", "df"];

/// A DGX H100: two sockets, eight GPUs, each on a PCIe switch with its own InfiniBand card.
fn dgx() -> (Sysfs, Topology) {
    let sys = Sysfs::new();
    sys.node(0, "0-55,112-167");
    sys.node(1, "56-111,168-223");
    for (number, bus) in GPUS.into_iter().enumerate() {
        let node = if number < 4 { "0" } else { "1" };
        let root = number + 1;
        let bridges = format!("pci0000:{root}0/0000:{root}0:01.0/0000:{root}1:00.0");
        sys.gpu(&format!("{bridges}/0000:{root}2:00.0"), &format!("0000:{bus}:00.0"), node);
        sys.infiniband(
            &format!("{bridges}/0000:{root}2:01.0"),
            &format!("0000:{root}8:00.0"),
            node,
            number,
        );
    }
    // The bridge of a GPU, a display controller that is not NVIDIA's, a card without a link, and the loopback.
    sys.device("pci0000:10", "0000:10:01.0", "0", &[("vendor", "0x8086"), ("class", "0x060400")]);
    sys.device("pci0000:00", "0000:00:02.0", "0", &[("vendor", "0x1a03"), ("class", "0x030000")]);
    sys.ethernet("eno3", "10000", "up");
    sys.ethernet("eno4", "-1", "down");
    sys.ethernet("lo", "0", "unknown");
    let mut topology = Topology::of_sysfs(&sys.0);
    // 18 links of each GPU to four switches.
    for bus in GPUS {
        for link in 0..18 {
            let remote = format!("0000:0{}:00.0", link % 4 + 5);
            let gpu = format!("0000:{bus}:00.0");
            topology.nvlinks.push(NvLink { gpu, remote, gbs: 25.0 });
        }
    }
    (sys, topology)
}

fn addresses() -> Vec<String> {
    GPUS.map(|bus| format!("0000:{bus}:00.0")).to_vec()
}

#[test]
fn a_dgx_is_read() {
    let (_sys, topology) = dgx();
    assert_eq!(topology.nodes.len(), 2);
    assert_eq!(topology.nodes[1].cores.len(), 112);
    let found: Vec<&str> = topology.gpus.iter().map(|gpu| gpu.address.as_str()).collect();
    assert_eq!(found, addresses());
    assert!(topology.gpus.iter().all(|gpu| (gpu.pcie_gbs.unwrap() - 63.0).abs() < 0.1));
    // Interfaces of InfiniBand cards count once; the card without a link does not.
    let fast = topology.nics.iter().filter(|nic| nic.kind == NicKind::InfiniBand).count();
    assert_eq!((topology.nics.len(), fast), (9, 8));
    assert_eq!(topology.network_gbs(), Some(400.0));
    for gpu in 0..8 {
        let near: Vec<&str> =
            topology.nearest_nics(gpu).iter().map(|nic| nic.name.as_str()).collect();
        assert_eq!(near, [format!("mlx5_{gpu}")]);
        assert_eq!(topology.between(0, 7), (Connection::NvLink, Some(450.0)));
    }
    let text = report(&topology).join("\n");
    assert!(text.contains("GPU at 0000:c3:00.0: NUMA node 1, PCIe, 63 GB/s"), "{text}");
    assert!(text.contains("28 pairs of GPUs: NVLink, 450 GB/s"), "{text}");
}

#[test]
fn ranks_are_placed_next_to_their_gpus() {
    let (_sys, topology) = dgx();
    let all: Vec<usize> = (0..224).collect();
    let placed = place(&topology, &addresses(), 8, &all);
    for (rank, placement) in placed.iter().enumerate() {
        assert_eq!(placement.gpu, addresses()[rank]);
        assert_eq!(placement.node, Some(rank / 4));
        assert_eq!(placement.cores.len(), 28);
        assert!(placement.cores.iter().all(|core| topology.nodes[rank / 4].cores.contains(core)));
        assert_eq!(placement.nics, [format!("mlx5_{rank}")]);
    }
    // No core belongs to two ranks.
    let mut cores: Vec<usize> = placed.iter().flat_map(|placed| placed.cores.clone()).collect();
    cores.sort_unstable();
    assert_eq!(cores, all);
    // Two GPUs that CUDA_VISIBLE_DEVICES lists in another order, shared by four ranks of a container with few cores.
    let visible = [addresses()[6].clone(), addresses()[0].clone()];
    let placed = place(&topology, &visible, 4, &[0, 1, 2, 60]);
    let found: Vec<_> =
        placed.iter().map(|placed| (placed.node.unwrap(), placed.cores.clone())).collect();
    assert_eq!(found, [(1, vec![60]), (0, vec![0]), (1, vec![60]), (0, vec![1, 2])]);
    assert_eq!(place(&topology, &[], 4, &all), []);
}

#[test]
fn gpus_without_nvlink_are_connected_by_pcie() {
    let sys = Sysfs::new();
    sys.node(0, "0-7");
    sys.node(1, "8-15");
    sys.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", "0000:1b:00.0", "0");
    sys.gpu("pci0000:10/0000:10:01.0/0000:11:01.0", "0000:1c:00.0", "0");
    sys.gpu("pci0000:10/0000:10:02.0", "0000:2b:00.0", "0");
    sys.gpu("pci0000:80/0000:80:01.0", "0000:8b:00.0", "1");
    let topology = Topology::of_sysfs(&sys.0);
    let kinds = [1, 2, 3].map(|other| topology.between(0, other).0);
    assert_eq!(kinds, [Connection::PcieSwitch, Connection::Node, Connection::System]);
}

#[test]
fn a_host_without_gpus_or_sysfs_is_empty() {
    let sys = Sysfs::new();
    sys.ethernet("eth0", "25000", "up");
    let topology = Topology::of_sysfs(&sys.0);
    assert_eq!(topology.network_gbs(), Some(3.125));
    assert!(topology.gpus.is_empty() && report(&topology).is_empty());
    assert_eq!(Topology::of_sysfs(Path::new("/no/such/folder")), Topology::default());
}

#[test]
fn this_host_can_be_read() {
    let topology = Topology::of_this_host();
    let all: Vec<usize> = topology.nodes.iter().flat_map(|node| node.cores.clone()).collect();
    let mut cores = all.clone();
    cores.dedup();
    assert_eq!(all, cores);
}
