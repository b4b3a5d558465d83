//! Memory that a process may still use, as far as Linux tells: of the machine, of the container and of the process.

use std::fs::read_to_string;
use std::path::Path;

/// Bytes of memory that are free or can be freed; unlimited if unknown.
pub(crate) fn available_memory() -> u64 {
    let text = |path: &str| read_to_string(path).unwrap_or_default();
    let machine = field(&text("/proc/meminfo"), "MemAvailable:").map(|kib| kib << 10);
    // Of the process; what it uses already is small compared with data that does not fit.
    let process = field(&text("/proc/self/limits"), "Max data size");
    let group = text("/proc/self/cgroup");
    let group = group.lines().find_map(|line| line.strip_prefix("0::"));
    let container = group.and_then(|group| container(Path::new("/sys/fs/cgroup"), group));
    [machine, process, container].into_iter().flatten().min().unwrap_or(u64::MAX)
}

/// The first number after a name at the start of a line; `None` if it is not a number, such as `unlimited`.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The least free memory of a cgroup (version 2) and of those that contain it.
fn container(root: &Path, group: &str) -> Option<u64> {
    let number = |path: &Path| read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let free = |folder: &Path| {
        let limit = number(&folder.join("memory.max"))?;
        Some(limit.saturating_sub(number(&folder.join("memory.current"))?))
    };
    let folder = root.join(group.trim_start_matches('/'));
    folder.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(free).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_proc_files() {
        let text = "Limit                     Soft Limit\nMax data size             4096    unlimited\nMax stack size  unlimited\n";
        assert_eq!(field(text, "Max data size"), Some(4096));
        assert_eq!(field(text, "Max stack size"), None);
        assert_eq!(field("MemAvailable:   123 kB\n", "MemAvailable:"), Some(123));
        assert!(available_memory() > 0);
    }

    #[test]
    fn the_smallest_container_counts() {
        let name = format!("lockstep-gbdt-cgroup-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let inner = root.join("pods/one");
        std::fs::create_dir_all(&inner).unwrap();
        for (folder, limit) in [(root.join("pods"), "1000"), (inner, "max")] {
            std::fs::write(folder.join("memory.max"), format!("{limit}\n")).unwrap();
            std::fs::write(folder.join("memory.current"), "300\n").unwrap();
        }
        let found = [container(&root, "/pods/one"), container(&root, "/")];
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [Some(700), None]);
    }
}
