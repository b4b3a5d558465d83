//! Resolves the value of `--cluster`, and reads this machine's available memory.

use std::path::Path;

use anyhow::{Context, bail};
use lockstep_kernels::Device;
use lockstep_plan::DeviceType;
use lockstep_sim::{Cluster, Engine, Options};

use crate::commands::bench::machine::{GPU, SHARED};
use crate::commands::device;
use crate::run_file::read_text;

/// The built-in cluster or the cluster file with this name. A file written by `bench machine` has one description per GPU
/// and one per number of ranks on CPUs; `ranks` and `kind` select it. If `kind` is None, GPUs are preferred.
pub fn cluster(
    name: &str,
    ranks: Option<usize>,
    kind: Option<DeviceType>,
) -> anyhow::Result<Cluster> {
    let path = Path::new(name);
    if !path.exists() && path.extension().is_none_or(|extension| extension != "toml") {
        return Cluster::named(name).map_err(|why| anyhow::anyhow!("--cluster: {why}"));
    }
    let text = read_text(path)?;
    parse(&text, ranks, kind).map_err(|why| anyhow::anyhow!("{name}: {why}"))
}

/// The cluster for a plan. On a measured machine with one GPU, more ranks share it, as processes under MPS.
pub fn shared_cluster(name: &str, ranks: Option<usize>) -> anyhow::Result<Cluster> {
    let cluster = cluster(name, ranks, None)?;
    let is_machine = Path::new(name).extension().is_some_and(|extension| extension == "toml");
    Ok(match ranks {
        Some(ranks)
            if is_machine && cluster.has_gpus() && cluster.ranks == Some(1) && ranks > 1 =>
        {
            cluster.shared_by(ranks, true)
        }
        _ => cluster,
    })
}

/// Parses a cluster, or one of the tables `[gpu.NAME]` and `[shared.RANKS]` of a file written by `bench machine`.
fn parse(text: &str, ranks: Option<usize>, kind: Option<DeviceType>) -> Result<Cluster, String> {
    let file: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    if let Some(toml::Value::Table(gpus)) = file.get(GPU).filter(|_| kind != Some(DeviceType::Cpu))
    {
        return of_table(gpu_table(gpus, gpu_name())?);
    }
    if kind == Some(DeviceType::Cuda) && file.contains_key(SHARED) {
        return Err("no GPU was measured; run `lockstep bench machine --device cuda`".into());
    }
    if file.contains_key(GPU) && !file.contains_key(SHARED) {
        return Err("only GPUs were measured; run `lockstep bench machine --device cpu`".into());
    }
    let Some(toml::Value::Table(shared)) = file.get(SHARED) else { return Cluster::parse(text) };
    let ranks = ranks.unwrap_or(1);
    let Some(table) = shared.get(&ranks.to_string()) else {
        let known: Vec<&str> = shared.keys().map(String::as_str).collect();
        let known = known.join(", ");
        return Err(format!(
            "measured with {known} ranks, not {ranks}; run `lockstep bench machine --ranks {ranks}`"
        ));
    };
    of_table(table)
}

/// The description of the present GPU, or the only one.
fn gpu_table(gpus: &toml::Table, present: Option<String>) -> Result<&toml::Value, String> {
    if let Some(table) = present.as_ref().and_then(|name| gpus.get(name)) {
        return Ok(table);
    }
    let known: Vec<&str> = gpus.keys().map(String::as_str).collect();
    match (present, gpus.values().next()) {
        (None, Some(only)) if gpus.len() == 1 => Ok(only),
        (present, _) => Err(format!(
            "measured on {}, not on {}; run `lockstep bench machine`",
            known.join(", "),
            present.as_deref().unwrap_or("this machine")
        )),
    }
}

/// The name of this machine's first GPU, if it can be used.
fn gpu_name() -> Option<String> {
    device::has_usable_gpu()
        .then(|| Device::cuda(0).ok()?.cuda_report())
        .flatten()
        .map(|gpu| gpu.gpu)
}

fn of_table(table: &toml::Value) -> Result<Cluster, String> {
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
    use super::*;

    #[test]
    fn error_for_a_file_of_another_version_suggests_measuring_again() {
        let before = "[shared.2]\nname = \"x\"\nper_host = 2\nskew = 0.02\n";
        assert_eq!(
            parse(before, Some(2), Some(DeviceType::Cpu)).unwrap_err(),
            "invalid type: floating point `0.02`, expected a sequence in `skew`; if another version of \
             Lockstep wrote this file, run `lockstep bench machine` again"
        );
    }

    #[test]
    fn the_present_gpu_is_selected() {
        let gpus: toml::Table = "a = 1\nb = 2".parse().unwrap();
        let select = |present: Option<&str>| gpu_table(&gpus, present.map(String::from)).cloned();
        assert_eq!(select(Some("b")), Ok(2.into()));
        let error = "measured on a, b, not on c; run `lockstep bench machine`";
        assert_eq!(select(Some("c")), Err(error.to_string()));
        assert!(select(None).unwrap_err().contains("not on this machine"));
        let one: toml::Table = "a = 1".parse().unwrap();
        assert_eq!(gpu_table(&one, None), Ok(&1.into()));
    }

    #[test]
    fn an_unmeasured_device_is_an_error() {
        let error = |text, kind| parse(text, Some(1), Some(kind)).unwrap_err();
        assert!(error("[shared.1]\n", DeviceType::Cuda).contains("--device cuda"));
        assert!(error("[gpu.x]\n", DeviceType::Cpu).contains("--device cpu"));
    }
}
