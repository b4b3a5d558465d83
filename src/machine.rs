//! Resolves the value of `--cluster`, and reads this machine's available memory.

use std::path::Path;

use anyhow::{Context, bail};
use lockstep_sim::{Cluster, Engine, Options};

use crate::run_file::read_text;

/// The built-in cluster or the cluster file with this name. A file written by `bench machine` has one description per
/// number of ranks; `ranks` selects it.
pub fn cluster(name: &str, ranks: Option<usize>) -> anyhow::Result<Cluster> {
    let path = Path::new(name);
    if !path.exists() && path.extension().is_none_or(|extension| extension != "toml") {
        return Cluster::named(name).map_err(|why| anyhow::anyhow!("--cluster: {why}"));
    }
    let text = read_text(path)?;
    parse(&text, ranks).map_err(|why| anyhow::anyhow!("{name}: {why}"))
}

/// Parses a cluster, or the table `[shared.RANKS]` of a file written by `bench machine`.
fn parse(text: &str, ranks: Option<usize>) -> Result<Cluster, String> {
    let file: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let Some(toml::Value::Table(shared)) = file.get("shared") else { return Cluster::parse(text) };
    let ranks = ranks.unwrap_or(1);
    let Some(table) = shared.get(&ranks.to_string()) else {
        let known: Vec<&str> = shared.keys().map(String::as_str).collect();
        let known = known.join(", ");
        return Err(format!(
            "measured with {known} ranks, not {ranks}; run `lockstep bench machine --ranks {ranks}`"
        ));
    };
    let cluster: Cluster = table.clone().try_into().map_err(|error: toml::de::Error| {
        let why = error.to_string();
        format!(
            "{}; if another version of Lockstep wrote this file, run `lockstep bench machine` again",
            why.trim().replace('\n', " ")
        )
    })?;
    cluster.check()?;
    Ok(cluster)
}

/// Simulation options. Traffic is counted exactly, rank by rank, on small clusters that run Lockstep's own collectives.
pub fn options(cluster: &Cluster, ranks: usize) -> Options {
    Options {
        exact: cluster.engine == Engine::Lockstep && ranks <= MAX_EXACT_RANKS,
        ..Options::default()
    }
}

const MAX_EXACT_RANKS: usize = 64;

/// Available memory of this machine in bytes.
pub fn available_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    match line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()) {
        Some(kib) => Ok(kib << 10),
        None => bail!("/proc/meminfo has no MemAvailable"),
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn error_for_a_file_of_another_version_suggests_measuring_again() {
        let before = "[shared.2]\nname = \"x\"\nper_host = 2\nskew = 0.02\n";
        assert_eq!(
            parse(before, Some(2)).unwrap_err(),
            "invalid type: floating point `0.02`, expected a sequence in `skew`; if another version of \
             Lockstep wrote this file, run `lockstep bench machine` again"
        );
    }
}
