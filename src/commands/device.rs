//! Opens the device that a rank computes on.

use anyhow::Context as _;
use lockstep_comm::World;
use lockstep_kernels::Device;
use lockstep_plan::DeviceKind;

/// The device of a rank, and a line about the choice: which GPU, or why not one. `LOCKSTEP_DEVICE` decides where the
/// run file says `auto`.
pub fn open(
    kind: DeviceKind,
    threads: usize,
    world: &World,
) -> anyhow::Result<(Device, Option<String>)> {
    match asked_for(kind)? {
        DeviceKind::Cpu => Ok((Device::cpu(threads), None)),
        DeviceKind::Cuda => {
            let device = on_gpu(world).context("device.kind = \"cuda\"")?;
            let line = describe(&device);
            Ok((device, line))
        }
        DeviceKind::Auto => match on_gpu(world) {
            Ok(device) => {
                let line = describe(&device);
                Ok((device, line))
            }
            // A machine without a GPU is the usual case and needs no line.
            Err(_) if !has_gpu() => Ok((Device::cpu(threads), None)),
            Err(error) => {
                let line = format!("device: CPU, because the GPU cannot be used: {error:#}");
                Ok((Device::cpu(threads), Some(line)))
            }
        },
    }
}

/// [`open`] for a device that could be opened before.
pub fn reopen(kind: DeviceKind, threads: usize, world: &World) -> Device {
    open(kind, threads, world).map_or_else(|error| panic!("{error:#}"), |(device, _)| device)
}

/// The device of a command without ranks.
pub fn open_alone(threads: usize) -> anyhow::Result<Device> {
    match asked_for(DeviceKind::Auto)? {
        DeviceKind::Cpu => Ok(Device::cpu(threads)),
        DeviceKind::Cuda => Ok(Device::cuda(0)?),
        DeviceKind::Auto => Ok(Device::cuda(0).unwrap_or_else(|_| Device::cpu(threads))),
    }
}

fn asked_for(kind: DeviceKind) -> anyhow::Result<DeviceKind> {
    let Some(name) = std::env::var("LOCKSTEP_DEVICE").ok().filter(|name| !name.is_empty()) else {
        return Ok(kind);
    };
    let named = DeviceKind::NAMES.iter().find(|(known, _)| *known == name);
    let (_, named) =
        named.with_context(|| format!("LOCKSTEP_DEVICE={name}: use auto, cpu or cuda"))?;
    Ok(if kind == DeviceKind::Auto { *named } else { kind })
}

/// The GPU with the number of this rank on its host. Ranks beyond the number of GPUs share them.
fn on_gpu(world: &World) -> anyhow::Result<Device> {
    let hosts = world.hosts();
    let mine = hosts[world.rank()];
    let local_rank = hosts[..world.rank()].iter().filter(|host| **host == mine).count();
    let count = Device::cuda_count()?;
    Ok(Device::cuda(local_rank % count.max(1))?)
}

/// Whether the driver's device file of a GPU exists.
fn has_gpu() -> bool {
    std::path::Path::new("/dev/nvidiactl").exists()
}

fn describe(device: &Device) -> Option<String> {
    let report = device.cuda_report()?;
    let libraries: Vec<String> =
        report.libraries.iter().map(|library| format!("{} {}", library.name, library.version)).collect();
    Some(format!(
        "device: GPU {} ({}, {} MiB); {}",
        report.index,
        report.gpu,
        report.total_bytes >> 20,
        libraries.join(", ")
    ))
}
