//! The CPU device's kernels: functions over slices. Knows nothing of pools or tags, and allocates nothing
//! once its scratch has grown to what the shapes need.

pub mod adamw;
pub mod attention;
pub mod balance;
pub mod cross_entropy;
mod cut;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod gemm;
pub mod largest;
mod level;
mod math;
pub mod norm;
pub mod pack;
pub mod random;
pub mod reduce;
pub mod rope;
pub mod routing;
mod scratch;
mod simd;
pub mod swiglu;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod vector;

pub use level::Level;
pub use scratch::Scratch;

use crate::Team;

/// What every CPU kernel is given: its threads, what the processor can do, and scratch memory per thread.
pub struct Cpu {
    pub team: Team,
    pub level: Level,
    /// One for each member of the team.
    pub scratch: Vec<Scratch>,
    /// What each member has to do of a matrix multiply.
    pub shares: gemm::Shares,
}

impl Cpu {
    /// A team of `threads`, and the best instructions that this processor has.
    pub fn new(threads: usize) -> Cpu {
        Cpu::at(Level::of_this_machine(), threads)
    }

    /// The same with fewer instructions than the processor has: what a test compares.
    ///
    /// # Panics
    /// When the processor lacks them.
    pub fn at(level: Level, threads: usize) -> Cpu {
        let best = Level::of_this_machine();
        assert!(level <= best, "this processor reaches {best:?}, not {level:?}");
        Cpu {
            team: Team::new(threads),
            level,
            scratch: (0..threads).map(|_| Scratch::new()).collect(),
            shares: gemm::Shares::new(threads),
        }
    }
}
