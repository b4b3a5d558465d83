//! What all loops on AMX tiles share.

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
