//! Engines of collectives on device memory.

use serde::{Deserialize, Serialize};

/// Engine of collectives on device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceEngine {
    /// `Shared` if all members use one GPU, `Nccl` if each has its own and NCCL is found, otherwise `Host`. Between ranks
    /// that MPI connects, `Mpi` if the library can read the memory of GPUs.
    #[default]
    Auto,
    /// Our own kernels on the memory of one GPU that all members use.
    Shared,
    Nccl,
    /// A CUDA-aware MPI, which connects the ranks.
    Mpi,
    /// The engine of host memory, through page-locked buffers.
    Host,
}

impl DeviceEngine {
    pub const ALL: [DeviceEngine; 5] = [
        DeviceEngine::Auto,
        DeviceEngine::Shared,
        DeviceEngine::Nccl,
        DeviceEngine::Mpi,
        DeviceEngine::Host,
    ];

    pub fn name(self) -> &'static str {
        match self {
            DeviceEngine::Auto => "auto",
            DeviceEngine::Shared => "shared",
            DeviceEngine::Nccl => "nccl",
            DeviceEngine::Mpi => "mpi",
            DeviceEngine::Host => "host",
        }
    }
}

impl std::str::FromStr for DeviceEngine {
    type Err = String;

    fn from_str(s: &str) -> Result<DeviceEngine, String> {
        DeviceEngine::ALL
            .into_iter()
            .find(|engine| engine.name() == s)
            .ok_or_else(|| format!("unknown engine {s}; use auto, shared, nccl, mpi or host"))
    }
}
