//! `lockstep launch --selftest`: the command of its ranks, and what each of them knows about its host.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use lockstep_comm::Op;
use lockstep_cuda::{loader, nvlink};
use lockstep_kernels::Device;
use lockstep_launch::identity;
use lockstep_launch::selftest::{self, SelfTest, Status};

use crate::print::print_line;
use crate::world::{self, Engine, Start};

/// Timeout of collectives. A host that does not answer is named after this time.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of the messages that measure links.
const LINK_BYTES: usize = 16 << 20;

/// The command that the launcher starts as ranks.
pub fn command(runs: &Path, storage_mib: usize, json: bool) -> anyhow::Result<Vec<OsString>> {
    let program = std::env::current_exe().context("cannot find this program's executable")?;
    let mut command: Vec<OsString> =
        [program.into_os_string(), "launch".into(), "--selftest".into()].into();
    command.extend(["--runs".into(), runs.into()]);
    command.extend(["--storage-mib".into(), storage_mib.to_string().into()]);
    command.extend(json.then(|| "--json".into()));
    Ok(command)
}

/// Runs the checks as a rank. Fails if a host failed.
pub fn rank(runs: &Path, storage_mib: usize, json: bool) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let node = identity::from_process_env()?.node;
    let (versions, problems) = (versions(), problems());
    let start = Start { engine: Engine::Shm, ranks: None, default_ranks: 1, logs: None };
    let failed = std::sync::atomic::AtomicBool::new(false);
    world::run(&start, TIMEOUT, |world| {
        // All ranks wait for the last one here.
        world.all_reduce(&mut [0i32], Op::Sum)?;
        let test = SelfTest {
            node,
            host: host_name(),
            versions: versions.clone(),
            problems: problems.clone(),
            rendezvous: started.elapsed(),
            folder: runs.to_path_buf(),
            storage_bytes: storage_mib.saturating_mul(1 << 20),
            link_bytes: LINK_BYTES,
        };
        let report = selftest::run(world, &test)?;
        if world.rank() == 0 {
            match json {
                true => print_line!("{}", serde_json::to_string(&report)?),
                false => print_line!("{report}"),
            }
        }
        failed.store(report.verdict == Status::Failed, std::sync::atomic::Ordering::Relaxed);
        // No rank exits with a failure while another still communicates.
        Ok(world.barrier()?)
    })?;
    Ok(if failed.into_inner() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    if name.trim().is_empty() { "unknown".into() } else { name.trim().into() }
}

/// Versions that must be equal on all hosts. The program is compared by its contents, too.
fn versions() -> BTreeMap<String, String> {
    let mut versions = BTreeMap::from([("lockstep".into(), program_version())]);
    if let Some(driver) = nvlink::driver_version() {
        versions.insert("NVIDIA driver".into(), driver);
    }
    let report = Device::cuda(0).ok().and_then(|device| device.cuda_report());
    for library in report.iter().flat_map(|report| &report.libraries) {
        versions.insert(library.name.into(), library.version.clone());
    }
    if let Some(report) = report {
        versions.insert("GPU".into(), report.gpu);
        versions.insert("NCCL".into(), loader::nccl_version().unwrap_or("missing".into()));
    }
    versions
}

fn program_version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let contents = std::env::current_exe().and_then(std::fs::read);
    match contents {
        Ok(contents) => format!("{version} ({})", &blake3::hash(&contents).to_hex()[..8]),
        Err(_) => version.to_string(),
    }
}

/// GPUs that cannot be used.
fn problems() -> Vec<String> {
    let Ok(count) = Device::cuda_count() else {
        let gpu = std::path::Path::new("/dev/nvidiactl").exists();
        return Device::check_cuda()
            .err()
            .filter(|_| gpu)
            .map(|e| e.to_string())
            .into_iter()
            .collect();
    };
    (0..count)
        .filter_map(|index| Device::cuda(index).err().map(|error| error.to_string()))
        .collect()
}
