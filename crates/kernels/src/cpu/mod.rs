//! The CPU kernels: functions over slices. They know nothing about memory pools or tags, and allocate nothing once
//! their scratch has grown to the size that the shapes need.

pub mod adamw;
#[cfg(target_arch = "x86_64")]
mod amx_tiles;
pub mod attention;
pub mod balance;
pub mod cross_entropy;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod gemm;
mod level;
mod math;
pub mod norm;
mod partition;
pub mod quantize;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod routing;
mod scratch;
mod simd;
pub mod swiglu;
pub mod top_k;
mod vector;

pub use level::Level;
pub use scratch::Scratch;

use crate::Team;

/// Execution context of every CPU kernel: threads, instruction set, and scratch memory per thread.
pub struct Cpu {
    pub team: Team,
    pub level: Level,
    /// One per thread.
    pub scratch: Vec<Scratch>,
    /// Work partition of matrix multiplies.
    pub gemm_balance: gemm::LoadBalancer,
}

impl Cpu {
    /// A team of `threads` with the best instruction set of this processor.
    pub fn new(threads: usize) -> Cpu {
        Cpu::at(Level::of_this_machine(), threads)
    }

    /// A team of `threads` with the given instruction set.
    ///
    /// # Panics
    /// If the processor does not support it.
    pub fn at(level: Level, threads: usize) -> Cpu {
        let best = Level::of_this_machine();
        assert!(level <= best, "this processor supports {best:?}, not {level:?}");
        Cpu {
            team: Team::new(threads),
            level,
            scratch: (0..threads).map(|_| Scratch::new()).collect(),
            gemm_balance: gemm::LoadBalancer::new(threads),
        }
    }
}
