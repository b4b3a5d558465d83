//! Parses Slurm's host lists (`gpu[001-003,7],login1`) and task counts (`2(x3),1`), as far as a rank needs them. Never
//! calls Slurm.

/// The node of a Slurm task within its job, for one launcher per node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlurmNode {
    pub index: usize,
    pub first_host: String,
}

impl SlurmNode {
    fn from_env(env: &dyn Fn(&str) -> Option<String>) -> Option<SlurmNode> {
        let index = env("SLURM_NODEID")?.trim().parse().ok()?;
        let list = env("SLURM_STEP_NODELIST").or_else(|| env("SLURM_JOB_NODELIST"))?;
        Some(SlurmNode { index, first_host: first_host(&list)? })
    }

    /// `None` if this process is not a Slurm task. For the command line only.
    pub fn from_process_env() -> Option<SlurmNode> {
        Self::from_env(&|name| std::env::var(name).ok())
    }
}

/// The first host of a list: `gpu001` for `gpu[001-003,7],login1`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let stop = rest.find(['[', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..stop]);
        if !rest[stop..].starts_with('[') {
            break;
        }
        let (ranges, after) = rest[stop + 1..].split_once(']')?;
        // The lower end of the first range, with its leading zeros.
        let first = ranges.split([',', '-']).next()?;
        if first.is_empty() || !first.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        host.push_str(first);
        rest = after;
    }
    let plausible = !host.is_empty() && !host.contains([']', ' ']);
    plausible.then_some(host)
}

/// The number of tasks on a node: in `2(x3),1`, node 2 has 2 tasks and node 3 has 1.
pub(super) fn tasks_on_node(counts: &str, node: usize) -> Option<usize> {
    let mut nodes_before = 0usize;
    for item in counts.trim().split(',') {
        let (tasks, nodes) = match item.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (item, 1usize),
        };
        let tasks = tasks.parse().ok()?;
        nodes_before = nodes_before.checked_add(nodes)?;
        if node < nodes_before {
            return Some(tasks);
        }
    }
    None
}

/// A port derived from the job id, the same in all tasks. Below 32768, where Linux starts to assign ports to outgoing
/// connections.
pub(super) fn port_of_job(job: u64) -> u16 {
    20_000 + (job % 12_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_hosts() {
        for (list, first) in [
            ("gpu[001-003,7],login1", Some("gpu001")),
            ("gpu[7,001-003]", Some("gpu7")),
            ("login1,gpu[1-2]", Some("login1")),
            ("node5", Some("node5")),
            ("rack[2-3]-gpu[09-10].cluster,x", Some("rack2-gpu09.cluster")),
            ("a-b[1-2]", Some("a-b1")),
            ("[1-4]", Some("1")),
            ("", None),
            (",a", None),
            ("gpu[", None),
            ("gpu[]", None),
            ("gpu[a-b]", None),
            ("gpu1]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list:?}");
        }
    }

    #[test]
    fn task_counts() {
        for (counts, per_node) in [
            ("2(x3),1", vec![2, 2, 2, 1]),
            ("4", vec![4]),
            ("1,2,3", vec![1, 2, 3]),
            ("8(x2)", vec![8, 8]),
            ("", vec![]),
            ("2(x", vec![]),
            ("2(3)", vec![]),
            ("two", vec![]),
        ] {
            for (node, tasks) in per_node.iter().enumerate() {
                assert_eq!(tasks_on_node(counts, node), Some(*tasks), "{counts:?}");
            }
            assert_eq!(tasks_on_node(counts, per_node.len()), None, "{counts:?}");
        }
    }

    #[test]
    fn node_of_a_task() {
        let env = |name: &str| match name {
            "SLURM_NODEID" => Some("2".to_string()),
            "SLURM_JOB_NODELIST" => Some("gpu[07-09]".to_string()),
            _ => None,
        };
        let node = SlurmNode { index: 2, first_host: "gpu07".into() };
        assert_eq!(SlurmNode::from_env(&env), Some(node));
        assert_eq!(SlurmNode::from_env(&|_| None), None);
    }

    #[test]
    fn ports_are_in_range() {
        for job in [0, 1, 11_999, 12_000, u64::MAX] {
            assert!((20_000..32_768).contains(&port_of_job(job)), "{job}");
        }
    }
}
