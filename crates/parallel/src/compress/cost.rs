//! What a compressed reduction costs: the collectives that it is made of, and what a rank sends in them. Pure; the
//! tests hold it against what was sent.

use super::{Form, chosen_of, form, rounded};
use lockstep_comm::{Algo, Collective, CollectiveShape};
use lockstep_kernels::cpu::largest::PAIR;
use lockstep_plan::Compression;

/// One collective of a reduction, in the sense of `lockstep_comm::CollectiveShape`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Exchange {
    pub kind: Collective,
    /// Elements; of an all-to-all-v the most that a rank sends, as it depends on the numbers.
    pub count: usize,
    /// Bytes of an element.
    pub width: usize,
}

/// The collectives of a reduction of `len` elements: `kind` is `AllReduce` or `ReduceScatter`.
pub fn exchanges(how: Compression, kind: Collective, len: usize, ranks: usize) -> Vec<Exchange> {
    assert!(
        matches!(kind, Collective::AllReduce | Collective::ReduceScatter),
        "{kind:?} is no reduction"
    );
    let bytes = |kind, count| Exchange { kind, count, width: 1 };
    let whole = kind == Collective::AllReduce;
    match form(how) {
        _ if ranks == 1 => Vec::new(),
        Form::Whole => vec![Exchange { kind, count: len, width: 4 }],
        Form::Rounded(code) => {
            let all = ranks * rounded::piece(code, len, ranks);
            let mut two = vec![bytes(Collective::AllToAll, all), bytes(Collective::AllGather, all)];
            two.truncate(if whole { 2 } else { 1 });
            two
        }
        Form::Chosen(fraction) => {
            let pairs = chosen_of(fraction, len) * PAIR;
            let counts = Exchange { kind: Collective::AllToAll, count: ranks, width: 8 };
            match whole {
                true => vec![bytes(Collective::AllGather, ranks * pairs)],
                false => vec![counts, bytes(Collective::AllToAllV, pairs)],
            }
        }
    }
}

/// Bytes that member `me` sends where each rank is a host of its own: by rings, and straight to whom they are for.
///
/// With P ranks and n = ⌈len/P⌉, an all-reduce sends 2(P-1) times 2n bytes in bf16, 2n + 4⌈n/256⌉ in f16 and
/// n + 4⌈n/256⌉ in int8; (P-1) · 8k of the k largest. A reduce-scatter sends half of that; of the k largest at most
/// 8(P-1) + 8k.
///
/// ```
/// use lockstep_comm::Collective;
/// use lockstep_parallel::compress::sent;
/// use lockstep_plan::Compression;
///
/// let of = |how| sent(how, Collective::AllReduce, 1 << 20, 4, 0);
/// assert_eq!(of(Compression::None), 2 * 3 * (1 << 18) * 4);
/// assert_eq!(of(Compression::Bf16), 2 * 3 * (1 << 18) * 2);
/// assert_eq!(of(Compression::Int8), 2 * 3 * ((1 << 18) + (1 << 10) * 4));
/// assert_eq!(of(Compression::TopK(0.01)), 3 * 10486 * 8);
/// ```
pub fn sent(how: Compression, kind: Collective, len: usize, ranks: usize, me: usize) -> u64 {
    let hosts: Vec<usize> = (0..ranks).collect();
    let of = |exchange: &Exchange| {
        let Exchange { kind, count, width } = *exchange;
        let algo = if kind == Collective::AllToAll { Algo::Flat } else { Algo::Ring };
        let shape = CollectiveShape { kind, count, width, root: 0, hosts: &hosts };
        match kind {
            Collective::AllToAllV => (count * width) as u64,
            _ => {
                lockstep_comm::predict_traffic(&shape, algo, me)
                    .expect("these have a formula")
                    .bytes
            }
        }
    };
    exchanges(how, kind, len, ranks).iter().map(of).sum()
}
