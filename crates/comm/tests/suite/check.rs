//! Checks every collective on a group of any world.

use crate::reference::{Number, combined, inputs};
use half::{bf16, f16};
use lockstep_comm::{Algo, Collective, Group, Op, shard_range};

/// Checks every collective of one type on one group, for one length and algorithm.
pub fn check<T: Number>(group: &Group, len: usize, algo: Algo) {
    let (me, n) = (group.rank(), group.size());
    let group = group.with_algo(Some(algo));
    let root = len % n;
    let supports = |kind: Collective| algo == Algo::Engine || Algo::of(kind).contains(&algo);
    let at = format!("{} members, {len} × {:?}, {algo:?}", n, T::DTYPE);

    for op in Op::ALL {
        if supports(Collective::AllReduce) {
            let mut buffer = inputs::<T>(me, len, op);
            group.all_reduce(&mut buffer, op).unwrap();
            assert_eq!(buffer, combined::<T>(n, len, op), "all_reduce {op:?}, {at}");
        }
        if supports(Collective::Reduce) {
            let mut buffer = inputs::<T>(me, len, op);
            group.reduce(&mut buffer, op, root).unwrap();
            let want = if me == root { combined(n, len, op) } else { inputs(me, len, op) };
            assert_eq!(buffer, want, "reduce {op:?}, {at}");
        }
        if supports(Collective::ReduceScatter) {
            let own = shard_range(len, n, me);
            let mut output = vec![T::default(); own.len()];
            group.reduce_scatter(&inputs::<T>(me, len, op), &mut output, op).unwrap();
            assert_eq!(output, combined::<T>(n, len, op)[own], "reduce_scatter {op:?}, {at}");
        }
    }

    let whole = inputs::<T>(77, len, Op::Sum);
    if supports(Collective::AllGather) {
        let mut output = vec![T::default(); len];
        group.all_gather(&whole[shard_range(len, n, me)], &mut output).unwrap();
        assert_eq!(output, whole, "all_gather, {at}");
    }
    if supports(Collective::Broadcast) {
        let mut buffer = if me == root { whole.clone() } else { vec![T::default(); len] };
        group.broadcast(&mut buffer, root).unwrap();
        assert_eq!(buffer, whole, "broadcast, {at}");
    }
    let all: Vec<T> = (0..n).flat_map(|r| inputs::<T>(r, len, Op::Sum)).collect();
    if supports(Collective::Gather) {
        let mut output = vec![T::default(); if me == root { len * n } else { 0 }];
        group.gather(&inputs::<T>(me, len, Op::Sum), &mut output, root).unwrap();
        assert_eq!(output, if me == root { all.clone() } else { vec![] }, "gather, {at}");
    }
    if supports(Collective::Scatter) {
        let mut output = vec![T::default(); len];
        let input = if me == root { &all[..] } else { &[] };
        group.scatter(input, &mut output, root).unwrap();
        assert_eq!(output, inputs::<T>(me, len, Op::Sum), "scatter, {at}");
    }
    if supports(Collective::AllToAll) {
        // The piece from p to q is the input of a rank p * n + q.
        let piece = |p: usize, q: usize| inputs::<T>(p * n + q, len / n, Op::Sum);
        let input: Vec<T> = (0..n).flat_map(|q| piece(me, q)).collect();
        let want: Vec<T> = (0..n).flat_map(|p| piece(p, me)).collect();
        let mut output = vec![T::default(); want.len()];
        group.all_to_all(&input, &mut output).unwrap();
        assert_eq!(output, want, "all_to_all, {at}");
    }
    if supports(Collective::AllToAllV) {
        // The length depends on sender and receiver and is sometimes zero.
        let count = |p: usize, q: usize| if (p + q) % 3 == 2 { 0 } else { len / n + 5 * p + q };
        let piece = |p: usize, q: usize| inputs::<T>(p * n + q, count(p, q), Op::Sum);
        let sent: Vec<usize> = (0..n).map(|q| count(me, q)).collect();
        let received: Vec<usize> = (0..n).map(|p| count(p, me)).collect();
        let input: Vec<T> = (0..n).flat_map(|q| piece(me, q)).collect();
        let want: Vec<T> = (0..n).flat_map(|p| piece(p, me)).collect();
        let mut output = vec![T::default(); want.len()];
        group.all_to_all_v(&input, &sent, &mut output, &received).unwrap();
        assert_eq!(output, want, "all_to_all_v, {at}");
    }
    if supports(Collective::Barrier) {
        group.barrier().unwrap();
    }
    if n > 1 {
        // Every member sends to the next and receives from the previous.
        let pending = group.start_send(inputs::<T>(me, len, Op::Sum), (me + 1) % n);
        let mut buffer = vec![T::default(); len];
        group.receive(&mut buffer, (me + n - 1) % n).unwrap();
        pending.wait().unwrap();
        assert_eq!(buffer, inputs::<T>((me + n - 1) % n, len, Op::Sum), "send/receive, {at}");
    }
}

/// All types and lengths on one group with every algorithm that its topology allows.
pub fn check_all(group: &Group, lengths: &[usize]) {
    let possible = |algo: &Algo| {
        let one_host = group.hosts().iter().all(|h| *h == 0);
        *algo != Algo::Engine && (*algo != Algo::Direct || one_host)
    };
    for algo in Algo::ALL.into_iter().filter(possible) {
        check_types(group, lengths, algo);
    }
}

/// All types and lengths on one group with one algorithm.
pub fn check_types(group: &Group, lengths: &[usize], algo: Algo) {
    for &len in lengths {
        check::<f32>(group, len, algo);
        check::<f64>(group, len, algo);
        check::<f16>(group, len, algo);
        check::<bf16>(group, len, algo);
        check::<i32>(group, len, algo);
        check::<i64>(group, len, algo);
        check::<u8>(group, len, algo);
    }
}
