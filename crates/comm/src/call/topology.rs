//! Placement of a group's members on hosts: `hosts[m]` is the host of member `m`, numbered from 0 in
//! order of first appearance. Pure.

/// Host numbers from host names or keys, in order of first appearance.
pub fn number_hosts<H: PartialEq>(hosts: impl Iterator<Item = H>) -> Vec<usize> {
    let mut seen: Vec<H> = Vec::new();
    hosts
        .map(|host| {
            seen.iter().position(|h| *h == host).unwrap_or_else(|| {
                seen.push(host);
                seen.len() - 1
            })
        })
        .collect()
}

/// The members on one host, in group order.
pub(crate) fn local_members(hosts: &[usize], host: usize) -> Vec<usize> {
    (0..hosts.len()).filter(|&m| hosts[m] == host).collect()
}

pub(crate) fn host_count(hosts: &[usize]) -> usize {
    hosts.iter().max().map_or(0, |h| h + 1)
}

/// Whether all hosts have the same number of members.
pub(crate) fn is_even(hosts: &[usize]) -> bool {
    let count = |host| hosts.iter().filter(|h| **h == host).count();
    hosts.iter().all(|h| count(*h) == count(hosts[0]))
}
