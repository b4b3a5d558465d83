//! AMX tile configuration, and a macro shared by all tile loops. They are in assembly because the tile intrinsics
//! are not stable.

use std::arch::asm;

/// Guard that configures this thread's eight tile registers as sixteen rows of 64 bytes each, and releases them
/// when it is dropped: a thread without tile state is cheaper to switch away from.
pub struct TileConfig(());

impl TileConfig {
    /// # Safety
    /// The level is `Amx`: the processor has AMX and the operating system permits it.
    pub unsafe fn load() -> TileConfig {
        /// Operand of `ldtilecfg` for palette 1.
        #[repr(C, align(64))]
        struct Configuration {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        const ALL_FULL: Configuration = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        // SAFETY: the processor has the instruction, which reads a configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &ALL_FULL, options(nostack, readonly)) };
        TileConfig(())
    }
}

impl Drop for TileConfig {
    fn drop(&mut self) {
        // SAFETY: a `TileConfig` exists only where the instructions may run; this one accesses no memory.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Instructions for `asm!`, each followed by eight nops.
///
/// While the core's other hyperthread is busy, adjacent tile instructions are executed one after the other: loads and
/// products then take 3.7 times as long as on an idle core. With nops between them they take 2.1 times as long. On an
/// idle core the nops are free: a product occupies its unit for sixteen cycles, enough to issue a hundred
/// instructions.
macro_rules! nop_spaced {
    ($($instruction:literal),* $(,)?) => {
        concat!($($instruction, "\n.rept 8\nnop\n.endr\n"),*)
    };
}

pub(in crate::cpu) use nop_spaced;
