//! Reads a sysfs tree. What is missing or cannot be understood is left out: a topology is a hint, not a requirement.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Nic, NicKind, NumaNode, PciGpu, Topology};

const NVIDIA: &str = "0x10de";
/// PCI classes of display and 3D controllers.
const DISPLAY: &str = "0x03";
/// Cores are read up to this number.
const MAX_CORES: usize = 1 << 16;

/// The topology below `root`, usually `/sys`.
pub fn read(root: &Path) -> Topology {
    Topology {
        nodes: nodes(&root.join("devices/system/node")),
        gpus: gpus(&root.join("bus/pci/devices")),
        nics: nics(root),
        nvlinks: Vec::new(),
    }
}

fn nodes(folder: &Path) -> Vec<NumaNode> {
    let node = |path: PathBuf| {
        let id = path.file_name()?.to_str()?.strip_prefix("node")?.parse().ok()?;
        Some(NumaNode { id, cores: cores(&text(&path.join("cpulist"))?) })
    };
    let mut nodes: Vec<NumaNode> = entries(folder).into_iter().filter_map(node).collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

fn gpus(folder: &Path) -> Vec<PciGpu> {
    let gpu = |path: PathBuf| {
        let is_gpu = text(&path.join("vendor"))? == NVIDIA
            && text(&path.join("class"))?.starts_with(DISPLAY);
        is_gpu.then(|| PciGpu {
            address: file_name(&path),
            node: node_of(&path),
            path: pci_path(&path),
            pcie_gbs: pcie_gbs(&path),
        })
    };
    let mut gpus: Vec<PciGpu> = entries(folder).into_iter().filter_map(gpu).collect();
    gpus.sort_by(|a, b| a.address.cmp(&b.address));
    gpus
}

/// Network interfaces and InfiniBand ports whose link is up. An interface of an InfiniBand card counts once.
fn nics(root: &Path) -> Vec<Nic> {
    let mut nics: Vec<Nic> =
        entries(&root.join("class/infiniband")).into_iter().filter_map(infiniband).collect();
    for path in entries(&root.join("class/net")) {
        let Some(nic) = ethernet(&path) else { continue };
        if !nics.iter().any(|other| !other.path.is_empty() && other.path == nic.path) {
            nics.push(nic);
        }
    }
    nics.sort_by(|a, b| a.name.cmp(&b.name));
    nics
}

fn infiniband(path: PathBuf) -> Option<Nic> {
    let device = path.join("device");
    let port = path.join("ports/1");
    text(&port.join("state"))?.contains("ACTIVE").then_some(())?;
    // "400 Gb/sec (4X NDR)"
    let rate = text(&port.join("rate"))?;
    let gigabits: f64 = rate.split_whitespace().next()?.parse().ok()?;
    Some(Nic {
        name: file_name(&path),
        kind: NicKind::InfiniBand,
        node: node_of(&device),
        path: pci_path(&device),
        gbs: (gigabits > 0.0).then_some(gigabits / 8.0),
    })
}

fn ethernet(path: &Path) -> Option<Nic> {
    let name = file_name(path);
    if name == "lo" || text(&path.join("operstate"))? != "up" {
        return None;
    }
    let device = path.join("device");
    // Megabits per second; -1 if it is unknown, as on virtual machines.
    let megabits = text(&path.join("speed")).and_then(|speed| speed.parse::<f64>().ok());
    let on_bus = device.exists();
    Some(Nic {
        name,
        kind: NicKind::Ethernet,
        node: node_of(&device).filter(|_| on_bus),
        path: if on_bus { pci_path(&device) } else { Vec::new() },
        gbs: megabits.filter(|megabits| *megabits > 0.0).map(|megabits| megabits / 8e3),
    })
}

/// The NUMA node of a device; -1 means that there is only one, or that it is unknown.
fn node_of(device: &Path) -> Option<usize> {
    match text(&device.join("numa_node"))?.parse::<i64>().ok()? {
        -1 => Some(0),
        node => usize::try_from(node).ok(),
    }
}

/// The PCI devices on the way to a device: host bridge, root port, switches; without the device itself.
fn pci_path(device: &Path) -> Vec<String> {
    let Ok(real) = fs::canonicalize(device) else { return Vec::new() };
    let names = real.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
    let mut path: Vec<String> =
        names.filter(|name| name.starts_with("pci") || is_pci_address(name)).collect();
    path.pop();
    path
}

/// `0000:1b:00.0`
fn is_pci_address(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit());
    let parts: Vec<&str> = name.split([':', '.']).collect();
    parts.len() == 4 && name.contains('.') && parts.iter().all(|part| digits(part))
}

/// GB/s of a slot in each direction: transfers per second and lane, without the encoding.
fn pcie_gbs(device: &Path) -> Option<f64> {
    // "32.0 GT/s PCIe". The current speed is lower while the device is idle.
    let speed = text(&device.join("max_link_speed"))?;
    let rate: f64 = speed.split_whitespace().next()?.parse().ok()?;
    let lanes: f64 = text(&device.join("current_link_width"))?.parse().ok()?;
    let encoding = if rate <= 5.0 { 8.0 / 10.0 } else { 128.0 / 130.0 };
    (lanes > 0.0).then_some(rate * lanes * encoding / 8.0)
}

/// A list of cores, `0-13,28-41`.
fn cores(list: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    list.split(',').filter_map(range).flatten().take(MAX_CORES).collect()
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).map_or(Vec::new(), |all| all.flatten().map(|entry| entry.path()).collect())
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_cores_are_parsed() {
        assert_eq!(cores("0-2,8,10-11"), [0, 1, 2, 8, 10, 11]);
        assert_eq!(cores("x,3-,4"), [4]);
        assert_eq!(cores(""), [0; 0]);
        assert_eq!(cores("0-99999999999").len(), MAX_CORES);
    }

    #[test]
    fn pci_addresses_are_recognized() {
        assert!(is_pci_address("0000:1b:00.0") && is_pci_address("10000:e1:00.0"));
        assert!(
            !is_pci_address("pci0000:15") && !is_pci_address("usb1") && !is_pci_address("a:b.c")
        );
    }
}
