//! Cost of a compressed reduction: the collectives that it consists of, and the bytes that a rank sends in them.

use lockstep_comm::{Algo, Collective, CollectiveShape};
use lockstep_plan::Compression;

/// One collective of a reduction, with the meaning of `lockstep_comm::CollectiveShape`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollectiveCall {
    pub kind: Collective,
    /// Number of elements. For an all-to-all-v, which depends on the data, the maximum that a rank sends.
    pub count: usize,
    /// Bytes per element.
    pub width: usize,
}

/// The collectives of a reduction of `len` elements; `kind` is `AllReduce` or `ReduceScatter`.
pub fn collective_calls(
    compression: Compression,
    kind: Collective,
    len: usize,
    ranks: usize,
) -> Vec<CollectiveCall> {
    let bytes = |kind, count| CollectiveCall { kind, count, width: 1 };
    let all_reduce = kind == Collective::AllReduce;
    let n = len.div_ceil(ranks);
    let scales = 4 * n.div_ceil(256);
    let quantized = |piece: usize| {
        let all = ranks * piece;
        let mut calls = vec![bytes(Collective::AllToAll, all), bytes(Collective::AllGather, all)];
        calls.truncate(if all_reduce { 2 } else { 1 });
        calls
    };
    match compression {
        _ if ranks == 1 => Vec::new(),
        Compression::None => vec![CollectiveCall { kind, count: len, width: 4 }],
        Compression::Bf16 => quantized(2 * n),
        Compression::F16 => quantized(2 * n + scales),
        Compression::Int8 => quantized(n + scales),
        Compression::TopK(fraction) => {
            let pairs = (fraction * len as f64).ceil() as usize * 8;
            let counts = CollectiveCall { kind: Collective::AllToAll, count: ranks, width: 8 };
            match all_reduce {
                true => vec![bytes(Collective::AllGather, ranks * pairs)],
                false => vec![counts, bytes(Collective::AllToAllV, pairs)],
            }
        }
    }
}

/// Bytes that rank `me` sends if every rank is on its own host: with ring algorithms, or directly to the receiver.
pub fn sent(
    compression: Compression,
    kind: Collective,
    len: usize,
    ranks: usize,
    me: usize,
) -> u64 {
    let hosts: Vec<usize> = (0..ranks).collect();
    let bytes = |call: &CollectiveCall| {
        let CollectiveCall { kind, count, width } = *call;
        let algo = if kind == Collective::AllToAll { Algo::Flat } else { Algo::Ring };
        let shape = CollectiveShape { kind, count, width, root: 0, hosts: &hosts };
        match kind {
            Collective::AllToAllV => (count * width) as u64,
            _ => lockstep_comm::predict_traffic(&shape, algo, me).unwrap().bytes,
        }
    };
    collective_calls(compression, kind, len, ranks).iter().map(bytes).sum()
}
