//! The collectives of a compressed reduction, in the form in which gradients are sent.

use crate::config::Compression;
use lockstep_types::Collective;

/// One collective of a reduction over a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WireCall {
    pub collective: Collective,
    /// Elements before they are cut.
    pub count: usize,
    /// Bytes per element.
    pub width: usize,
}

/// Bytes of an element of top-k: an index and a value.
const PAIR_BYTES: usize = 8;

/// The calls that reduce `len` elements of `width` bytes over `ranks` ranks; `collective` is an all-reduce or a
/// reduce-scatter.
pub fn wire_calls(
    compression: Compression,
    collective: Collective,
    ranks: usize,
    (len, width): (usize, usize),
) -> Vec<WireCall> {
    let bytes = |collective, count| WireCall { collective, count, width: 1 };
    let whole = collective == Collective::AllReduce;
    match compression {
        Compression::None => vec![WireCall { collective, count: len, width }],
        Compression::TopK(_) => {
            let pairs = PAIR_BYTES * compression.selected(len);
            let counts = WireCall { collective: Collective::AllToAll, count: ranks, width: 8 };
            match whole {
                true => vec![bytes(Collective::AllGather, ranks * pairs)],
                false => vec![counts, bytes(Collective::AllToAllV, pairs)],
            }
        }
        // To the owners of the shards, and the sums back.
        quantized => {
            let all = ranks * quantized_bytes(quantized, len.div_ceil(ranks));
            let there = bytes(Collective::AllToAll, all);
            let back = whole.then_some(bytes(Collective::AllGather, all));
            [there].into_iter().chain(back).collect()
        }
    }
}

/// Bytes of quantized numbers; all but bf16 have a scale for every 256.
fn quantized_bytes(compression: Compression, numbers: usize) -> usize {
    match compression {
        Compression::Bf16 => 2 * numbers,
        Compression::F16 => 2 * numbers + 4 * numbers.div_ceil(256),
        _ => numbers + 4 * numbers.div_ceil(256),
    }
}
