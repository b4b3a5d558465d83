//! What all loops on AMX tiles share. They are in assembly, as the compiler's intrinsics for tiles are not stable.

use std::arch::asm;

/// While it lives, this thread's eight tile registers have sixteen rows of 64 bytes each. They are empty again after: a
/// thread that holds none is cheaper to switch away from.
pub struct Tiles(());

impl Tiles {
    /// # Safety
    /// The processor has AMX and the kernel allows it: level `Amx`.
    pub unsafe fn configured() -> Tiles {
        /// What `ldtilecfg` reads, in the form of palette 1.
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
        Tiles(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a `Tiles` is only made where the instructions may run; this one touches no memory.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Instructions for `asm!`, each followed by eight that do nothing.
///
/// While the core's other hyperthread is at work, tile instructions that enter the core together are carried out one
/// after the other, each to its end: loads and products then take 3.7 times as long as on a core of one's own. Kept
/// apart they take 2.1 times as long. On a core of one's own that costs nothing: a product keeps its unit for sixteen
/// cycles, in which a hundred instructions could enter.
macro_rules! apart {
    ($($instruction:literal),* $(,)?) => {
        concat!($($instruction, "\n.rept 8\nnop\n.endr\n"),*)
    };
}

pub(in crate::cpu) use apart;
