//! Checks and times one collective at one size.
//!
//! Timing follows the benchmarks in bench/peers: warm up with batches of 1, 2, 4, … calls until a batch takes 50 ms, then
//! time as many calls as fill the given time, but at least five. The slowest rank counts.

use super::comm::Buffers;
use super::private::Private;
use half::{bf16, f16};
use lockstep_comm::{Algo, Collective, Element, Group, Op, Result, Symmetric, World, shard_range};
use std::time::Instant;

pub struct Case {
    pub kind: Collective,
    /// Size of the whole buffer in bytes.
    pub bytes: usize,
    pub op: Op,
    pub algo: Option<Algo>,
    pub buffers: Buffers,
    pub seconds: f64,
}

/// Result of a case, the same on all ranks.
pub struct Measured {
    pub ranks: usize,
    pub algo: &'static str,
    pub seconds: f64,
    pub wrong: u64,
}

/// An element type that represents small integers exactly.
pub trait FromSmall: Element {
    fn from_small(n: usize) -> Self;
}

macro_rules! from_small {
    ($($t:ty => $f:expr),*) => {$(
        impl FromSmall for $t {
            fn from_small(n: usize) -> $t {
                ($f)(n)
            }
        }
    )*};
}
from_small!(
    f32 => |n| n as f32, f64 => |n| n as f64, i32 => |n| n as i32, i64 => |n| n as i64,
    u8 => |n| n as u8, u32 => |n| n as u32, f16 => |n| f16::from_f32(n as f32), bf16 => |n| bf16::from_f32(n as f32)
);

pub fn measure<T: FromSmall>(world: &World, case: &Case) -> Result<Measured> {
    let group = world.with_algo(case.algo);
    let mut buffers = Pair::<T>::new(&group, case)?;
    let wrong = check(&group, case, &mut buffers)?;
    buffers.fill(|_| T::from_small(0), |_| T::from_small(0));
    call(&group, case, &mut buffers)?;
    // Read now: the timing below makes calls of its own.
    let algo = world.flight_record().last().map_or("-", |entry| entry.algo);
    let seconds = time(&group, case, &mut buffers)?;
    Ok(Measured { ranks: group.size(), algo, seconds, wrong })
}

/// One buffer of a rank.
enum Buffer<T: Element> {
    Ordinary(Vec<T>),
    Private(Private<T>),
    Symmetric(Symmetric<T>),
}

impl<T: Element> Buffer<T> {
    fn new(group: &Group, len: usize, kind: Buffers) -> Result<Buffer<T>> {
        Ok(match kind {
            Buffers::Ordinary => Buffer::Ordinary(vec![T::default(); len]),
            Buffers::Private => Buffer::Private(Private::zeroed(len)),
            Buffers::Symmetric => Buffer::Symmetric(group.symmetric(len)?),
        })
    }

    fn slice(&mut self) -> &mut [T] {
        match self {
            Buffer::Ordinary(values) => values,
            Buffer::Private(values) => values,
            Buffer::Symmetric(values) => values,
        }
    }
}

/// The buffers of a case. In-place collectives use only the input.
struct Pair<T: Element> {
    input: Buffer<T>,
    output: Buffer<T>,
}

impl<T: FromSmall> Pair<T> {
    fn new(group: &Group, case: &Case) -> Result<Pair<T>> {
        let (n, me) = (group.size(), group.rank());
        // All-to-all, gather and scatter need parts of equal size.
        let len = case.bytes / size_of::<T>() / n * n;
        let whole = case.bytes / size_of::<T>();
        // Symmetric buffers have the same length on all ranks, that of the largest shard.
        let shard = |total: usize| match case.buffers {
            Buffers::Ordinary | Buffers::Private => shard_range(total, n, me).len(),
            Buffers::Symmetric => shard_range(total, n, 0).len(),
        };
        let (input, output) = match case.kind {
            Collective::ReduceScatter => (whole, shard(whole)),
            Collective::AllGather => (shard(whole), whole),
            Collective::Gather => (len / n, len),
            Collective::Scatter => (len, len / n),
            Collective::AllToAll => (len, len),
            _ => (whole, 0),
        };
        Ok(Pair {
            input: Buffer::new(group, input, case.buffers)?,
            output: Buffer::new(group, output, case.buffers)?,
        })
    }

    fn fill(&mut self, input: impl Fn(usize) -> T, output: impl Fn(usize) -> T) {
        self.input.slice().iter_mut().enumerate().for_each(|(i, x)| *x = input(i));
        self.output.slice().iter_mut().enumerate().for_each(|(i, x)| *x = output(i));
    }
}

fn call<T: FromSmall>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<()> {
    let (n, me) = (group.size(), group.rank());
    let whole = case.bytes / size_of::<T>();
    let (input, output) = (buffers.input.slice(), buffers.output.slice());
    match case.kind {
        Collective::AllReduce => group.all_reduce(input, case.op),
        Collective::Reduce => group.reduce(input, case.op, 0),
        Collective::Broadcast => group.broadcast(input, 0),
        Collective::ReduceScatter => {
            group.reduce_scatter(input, &mut output[..shard_range(whole, n, me).len()], case.op)
        }
        Collective::AllGather => {
            group.all_gather(&input[..shard_range(whole, n, me).len()], output)
        }
        Collective::Gather => group.gather(input, output, 0),
        Collective::Scatter => group.scatter(input, output, 0),
        Collective::AllToAll => group.all_to_all(input, output),
        Collective::AllToAllV | Collective::Barrier | Collective::SendRecv => {
            unreachable!("not in OPS")
        }
    }
}

/// Input of a rank at an index: small, so that sums are exact in every type.
pub fn input_value(rank: usize, index: usize) -> usize {
    (index + rank) % 3
}

/// Runs the collective once on known values and returns the number of wrong results on all ranks.
fn check<T: FromSmall>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<u64> {
    let (n, me) = (group.size(), group.rank());
    buffers.fill(|i| T::from_small(input_value(me, i)), |_| T::from_small(9));
    call(group, case, buffers)?;
    let reduced = |i: usize| {
        let values = (0..n).map(|r| input_value(r, i));
        match case.op {
            Op::Sum => T::from_small(values.sum()),
            Op::Product => T::from_small(values.product()),
            Op::Min => T::from_small(values.min().unwrap_or(0)),
            Op::Max => T::from_small(values.max().unwrap_or(0)),
            Op::Mean => mean(values.sum(), n),
        }
    };
    let pieces = case.bytes / size_of::<T>() / n;
    let whole = case.bytes / size_of::<T>();
    let (input, output) = (buffers.input.slice(), buffers.output.slice());
    let count = |values: &[T], want: &dyn Fn(usize) -> T| {
        values.iter().enumerate().filter(|(i, v)| **v != want(*i)).count() as i64
    };
    let own = shard_range(whole, n, me);
    let owner = |i: usize| (0..n).find(|r| shard_range(whole, n, *r).contains(&i)).unwrap_or(0);
    let wrong = match case.kind {
        Collective::AllReduce => count(input, &reduced),
        Collective::Reduce if me == 0 => count(input, &reduced),
        Collective::Reduce => count(input, &|i| T::from_small(input_value(me, i))),
        Collective::Broadcast => count(input, &|i| T::from_small(input_value(0, i))),
        Collective::ReduceScatter => count(&output[..own.len()], &|i| reduced(own.start + i)),
        Collective::AllGather => {
            let starts: Vec<usize> = (0..n).map(|r| shard_range(whole, n, r).start).collect();
            count(output, &|i| T::from_small(input_value(owner(i), i - starts[owner(i)])))
        }
        Collective::Gather if me == 0 => {
            count(output, &|i| T::from_small(input_value(i / pieces, i % pieces)))
        }
        Collective::Scatter => count(output, &|i| T::from_small(input_value(0, me * pieces + i))),
        Collective::AllToAll => {
            count(output, &|i| T::from_small(input_value(i / pieces, me * pieces + i % pieces)))
        }
        _ => 0,
    };
    let mut total = [wrong];
    group.with_algo(None).all_reduce(&mut total, Op::Sum)?;
    Ok(total[0] as u64)
}

/// The mean in the arithmetic of the type: rounded for f16 and bf16, truncated for integers.
fn mean<T: FromSmall>(sum: usize, n: usize) -> T {
    use std::any::TypeId;
    let quotient = sum as f64 / n as f64;
    let id = TypeId::of::<T>();
    let cast =
        |value: &dyn std::any::Any| *value.downcast_ref::<T>().expect("the type ids are equal");
    if id == TypeId::of::<f32>() {
        cast(&(sum as f32 / n as f32))
    } else if id == TypeId::of::<f64>() {
        cast(&quotient)
    } else if id == TypeId::of::<f16>() {
        cast(&f16::from_f32(sum as f32 / n as f32))
    } else if id == TypeId::of::<bf16>() {
        cast(&bf16::from_f32(sum as f32 / n as f32))
    } else {
        T::from_small(sum / n)
    }
}

/// Seconds per call.
fn time<T: FromSmall>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<f64> {
    const WARM_UP_SECONDS: f64 = 0.05;
    let mut calls = 1;
    let warm_up = loop {
        let seconds = batch(group, case, buffers, calls)?;
        if seconds >= WARM_UP_SECONDS {
            break seconds;
        }
        calls *= 2;
    };
    let calls = ((case.seconds * calls as f64 / warm_up).ceil() as usize).max(5);
    Ok(batch(group, case, buffers, calls)? / calls as f64)
}

/// Seconds of the slowest rank for `calls` calls.
fn batch<T: FromSmall>(
    group: &Group,
    case: &Case,
    buffers: &mut Pair<T>,
    calls: usize,
) -> Result<f64> {
    let default = group.with_algo(None);
    default.barrier()?;
    let start = Instant::now();
    for _ in 0..calls {
        call(group, case, buffers)?;
    }
    let mut seconds = [start.elapsed().as_secs_f64()];
    default.all_reduce(&mut seconds, Op::Max)?;
    Ok(seconds[0])
}
