//! From what was typed behind `--cluster` to a described machine, and what this machine has left.

use std::path::Path;

use anyhow::{Context, bail};
use lockstep_sim::{Cluster, Engine, Options};

/// A built-in cluster by its name, or a file. `ranks`: of the plan, for files that describe a machine by how many
/// ranks share it.
pub fn cluster(typed: &str, ranks: Option<usize>) -> anyhow::Result<Cluster> {
    let path = Path::new(typed);
    if !path.exists() && path.extension().is_none_or(|ending| ending != "toml") {
        return Cluster::named(typed).map_err(|why| anyhow::anyhow!("--cluster: {why}"));
    }
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {typed}"))?;
    of_text(&text, ranks).map_err(|why| anyhow::anyhow!("{typed}: {why}"))
}

/// A cluster, or of `[shared.1]`, `[shared.2]`, … the one for so many ranks.
fn of_text(text: &str, ranks: Option<usize>) -> Result<Cluster, String> {
    let file: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let Some(toml::Value::Table(shared)) = file.get("shared") else { return Cluster::parse(text) };
    let ranks = ranks.unwrap_or(1);
    let Some(own) = shared.get(&ranks.to_string()) else {
        let known: Vec<&str> = shared.keys().map(String::as_str).collect();
        let known = known.join(", ");
        return Err(format!(
            "measured with {known} ranks, not {ranks}; run `lockstep bench machine --ranks {ranks}`"
        ));
    };
    let cluster: Cluster = own.clone().try_into().map_err(|error: toml::de::Error| {
        let why = error.to_string();
        format!(
            "{}; if another version of this program wrote it, run `lockstep bench machine` again",
            why.trim().replace('\n', " ")
        )
    })?;
    cluster.check()?;
    Ok(cluster)
}

/// This program: to the byte where it runs itself, on so few ranks that they can be counted one by one.
pub fn options(cluster: &Cluster, ranks: usize) -> Options {
    Options {
        exact: cluster.engine == Engine::Lockstep && ranks <= MOST_COUNTED,
        ..Options::default()
    }
}

const MOST_COUNTED: usize = 64;

/// Bytes that programs on this machine may still take.
pub fn available_memory() -> anyhow::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    match line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()) {
        Some(kib) => Ok(kib << 10),
        None => bail!("/proc/meminfo does not say MemAvailable"),
    }
}

#[cfg(test)]
mod tests {
    use super::of_text;

    #[test]
    fn a_file_of_another_version_says_how_to_make_it_anew() {
        let before = "[shared.2]\nname = \"x\"\nper_host = 2\nskew = 0.02\n";
        assert_eq!(
            of_text(before, Some(2)).unwrap_err(),
            "invalid type: floating point `0.02`, expected a sequence in `skew`; if another version of this program \
             wrote it, run `lockstep bench machine` again"
        );
    }
}
