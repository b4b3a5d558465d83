//! Opens the device that a rank computes on.

use std::sync::OnceLock;

use crate::print::{print_error, print_line};
use lockstep_comm::{DeviceEngine, NcclReport, World};
use lockstep_cuda::{Gpu, mps_runs};
use lockstep_kernels::{CudaLibrary, CudaReport, Device};
use lockstep_launch::identity;
use lockstep_launch::topology::{self, Topology};
use lockstep_plan::{DeviceType, Ledger, Plan};
use lockstep_sim::Cluster;

use crate::world::Engine;

/// The device of a rank.
pub fn open(plan: &Plan, world: &World) -> anyhow::Result<Device> {
    let device = match plan.device.kind {
        DeviceType::Cpu => Device::cpu(plan.train.threads),
        DeviceType::Cuda => on_gpu(world)?,
    };
    if plan.precision.fp8.is_on() && !device.has_fp8() {
        let report = device.cuda_report();
        let (gpu, has) = report.map_or(("the CPU".into(), "none".into()), |report| {
            (format!("GPU {} ({})", report.index, report.gpu), report.capability)
        });
        anyhow::bail!(
            "precision.fp8={} needs compute capability 8.9 or newer, but {gpu} has {has}; use precision.fp8=off",
            plan.precision.fp8.name()
        );
    }
    device.set_tf32(plan.device.tf32);
    // If it is allowed, the GPU measures which is faster.
    device.set_grouped_matmul(if plan.device.grouped_experts { None } else { Some(false) });
    device.set_deterministic_attention(plan.device.deterministic);
    if let Some(limit) = plan.device.memory_limit {
        device.set_memory_limit(limit as usize);
    }
    if plan.comm.register_buffers {
        device.separate_chunks(Ledger::of(plan, world.rank()).total());
    }
    Ok(device)
}

/// A line about the device: which GPU, or why none is used although there is one. Nothing on a machine without GPUs.
pub fn describe(device: &Device, plan: &Plan) -> Option<String> {
    let Some(report) = device.cuda_report() else {
        let error = Device::check_cuda().err().filter(|_| has_gpu())?;
        return Some(format!("device: CPU, because the GPU cannot be used: {error}"));
    };
    let version = |library: &CudaLibrary| format!("{} {}", library.name, library.version);
    let libraries: Vec<String> = report.libraries.iter().map(version).collect();
    let mut line = format!(
        "device: GPU {} ({}, {} MiB); {}",
        report.index,
        report.gpu,
        report.total_bytes >> 20,
        libraries.join(", ")
    );
    if !plan.device.deterministic {
        line += "\ngradients of attention may differ in their last bits from run to run: device.deterministic=true prevents it and is slower";
    }
    Some(line)
}

/// The described cluster as the ranks of this world use it. If they share a GPU, it is one GPU shared by all. An error says
/// why no time can be predicted.
pub fn as_used(
    cluster: Cluster,
    plan: &Plan,
    world: &World,
    engine: Engine,
) -> Result<Cluster, String> {
    let on_host = |host: usize| world.hosts().iter().filter(|other| **other == host).count();
    let most = world.hosts().iter().map(|host| on_host(*host)).max().unwrap_or(1);
    let gpus = match plan.device.kind {
        DeviceType::Cuda => Device::cuda_count().unwrap_or(most),
        DeviceType::Cpu => most,
    };
    let processes = engine != Engine::Threads;
    let shared = matches!(plan.comm.device_engine, DeviceEngine::Auto | DeviceEngine::Shared);
    if most <= gpus {
        Ok(cluster)
    } else if gpus > 1 || most < plan.ranks {
        Err("predictions are for a GPU per rank, or one GPU for all ranks".into())
    } else if !shared {
        Err("ranks share a GPU, and predictions assume comm.device_engine=shared".into())
    } else if processes && !mps_runs() {
        Err("processes take turns on a GPU that they share without MPS; start it with \
             `nvidia-cuda-mps-control -d`, or use --engine threads"
            .into())
    } else {
        Ok(cluster.shared_by(plan.ranks, processes))
    }
}

/// Chooses the engine of collectives on device memory. Rank 0 prints it once, with the reason.
pub fn open_collectives(plan: &Plan, world: &World, device: &Device) -> anyhow::Result<()> {
    let Some(gpu) = device.gpu().filter(|_| world.size() > 1) else { return Ok(()) };
    let choice = world.open_device(Some(&gpu), lockstep_trainer::device_options(plan))?;
    if world.rank() == 0 {
        print_line!("collectives on device memory: {} ({})", choice.engine.name(), choice.reason);
        if let Some(warning) = choice.warning {
            print_error!("warning: {warning}");
        }
    }
    Ok(())
}

/// The GPUs of this machine with the libraries that were found, or why they cannot be used. Empty without GPUs.
pub fn report() -> Vec<String> {
    match Device::cuda_count().and_then(|count| (0..count).map(Device::cuda).collect()) {
        Ok(devices) => {
            let devices: Vec<Device> = devices;
            let reports = devices.iter().filter_map(Device::cuda_report).flat_map(report_lines);
            reports
                .chain([nccl_line()])
                .chain(topology::report(&Topology::of_this_host()))
                .collect()
        }
        Err(error) if has_gpu() => vec![format!("the GPU cannot be used: {error}")],
        Err(_) => Vec::new(),
    }
}

/// Version of NCCL, or why it cannot be used.
fn nccl_line() -> String {
    match lockstep_comm::nccl_report() {
        Ok(NcclReport { version, path }) => format!("NCCL {version}: {}", path.display()),
        Err(error) => format!("NCCL cannot be used: {error}"),
    }
}

fn report_lines(report: CudaReport) -> Vec<String> {
    let CudaReport { index, gpu, capability, total_bytes, multiprocessors, libraries } = report;
    let mut lines = vec![format!(
        "GPU {index}: {gpu}, compute capability {capability}, {multiprocessors} multiprocessors, {} MiB",
        total_bytes >> 20
    )];
    lines.extend(libraries.into_iter().map(|CudaLibrary { name, version, path }| {
        format!("    {name} {version}: {}", path.display())
    }));
    lines
}

/// Whether `device.kind = "auto"` means a GPU. `LOCKSTEP_DEVICE` decides if it is `cpu` or `cuda`.
pub fn has_usable_gpu() -> bool {
    static USABLE: OnceLock<bool> = OnceLock::new();
    *USABLE.get_or_init(|| match Device::type_from_env() {
        Ok(Some(kind)) => kind == DeviceType::Cuda,
        // `main` rejects an invalid value.
        Ok(None) | Err(_) => Device::check_cuda().is_ok(),
    })
}

/// The device of a command without ranks.
pub fn open_alone(threads: usize) -> anyhow::Result<Device> {
    match has_usable_gpu() {
        false => Ok(Device::cpu(threads)),
        true => Ok(Device::cuda(0)?),
    }
}

/// The GPU with the number of this rank on its host, or of its slot if ranks before it were excluded. Ranks beyond the
/// number of GPUs share them. Binds this thread to the cores next to the GPU.
fn on_gpu(world: &World) -> anyhow::Result<Device> {
    let hosts = world.hosts();
    let mine = hosts[world.rank()];
    let on_host = |hosts: &[usize]| hosts.iter().filter(|host| **host == mine).count();
    let local_rank = on_host(&hosts[..world.rank()]);
    let slot = identity::slot_from_process_env().unwrap_or(local_rank);
    let count = Device::cuda_count()?.max(1);
    bind_next_to_gpu(slot, on_host(hosts), count);
    Ok(Device::cuda(slot % count)?)
}

/// Binds this thread, and those that it starts, to the cores of the GPU's NUMA node, which ranks on the same node share.
/// Nothing happens if the system does not tell the node.
fn bind_next_to_gpu(slot: usize, local_ranks: usize, count: usize) {
    let Ok(gpus) = (0..count).map(Gpu::pci_address).collect::<Result<Vec<_>, _>>() else { return };
    let allowed = topology::allowed_cores();
    let ranks = local_ranks.max(slot + 1);
    let placed = topology::place(&Topology::of_this_host(), &gpus, ranks, &allowed);
    let Some(placement) = placed.get(slot).filter(|placed| !placed.cores.is_empty()) else {
        return;
    };
    if placement.cores == allowed {
        return;
    }
    match topology::bind_to(&placement.cores) {
        Ok(()) => tracing::info!(
            "local rank {slot}: GPU at {}, NUMA node {:?}, {} cores from core {}, network cards {:?}",
            placement.gpu,
            placement.node,
            placement.cores.len(),
            placement.cores[0],
            placement.nics
        ),
        Err(error) => tracing::warn!("cannot bind to the cores next to the GPU: {error}"),
    }
}

/// Whether the driver's device file of a GPU exists.
fn has_gpu() -> bool {
    std::path::Path::new("/dev/nvidiactl").exists()
}
