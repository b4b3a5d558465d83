//! One collective at one size: checked once, then timed.
//!
//! The rule of timing is that of the benchmark beside the peers, so that all are measured alike: warm
//! up in batches of 1, 2, 4 … calls until one lasts 50 ms, then time as many calls as fill the given
//! time, five at least. A time is the longest of all ranks.

use super::comm::Buffers;
use super::private::Private;
use half::{bf16, f16};
use lockstep_comm::{Algo, Collective, Element, Group, Op, Result, Symmetric, World, shard_range};
use std::time::Instant;

/// What to measure.
pub struct Case {
    pub kind: Collective,
    /// Bytes of the whole buffer.
    pub bytes: usize,
    pub op: Op,
    pub algo: Option<Algo>,
    pub buffers: Buffers,
    pub seconds: f64,
}

/// What came out, equal on all ranks.
pub struct Measured {
    pub ranks: usize,
    pub algo: &'static str,
    pub seconds: f64,
    pub wrong: u64,
}

/// A number type that small whole numbers can be made of.
pub trait Small: Element {
    fn small(n: usize) -> Self;
}

macro_rules! small {
    ($($t:ty => $f:expr),*) => {$(
        impl Small for $t {
            fn small(n: usize) -> $t {
                ($f)(n)
            }
        }
    )*};
}
small!(
    f32 => |n| n as f32, f64 => |n| n as f64, i32 => |n| n as i32, i64 => |n| n as i64,
    u8 => |n| n as u8, u32 => |n| n as u32, f16 => |n| f16::from_f32(n as f32), bf16 => |n| bf16::from_f32(n as f32)
);

pub fn measure<T: Small>(world: &World, case: &Case) -> Result<Measured> {
    let group = world.with_algo(case.algo);
    let mut buffers = Pair::<T>::new(&group, case)?;
    let wrong = check(&group, case, &mut buffers)?;
    buffers.fill(|_| T::small(0), |_| T::small(0));
    let seconds = time(&group, case, &mut buffers)?;
    let algo =
        world.flight_record().iter().rev().find(|e| e.kind == case.kind.name()).map(|e| e.algo);
    Ok(Measured { ranks: group.size(), algo: algo.unwrap_or("-"), seconds, wrong })
}

/// Memory of one rank.
enum Memory<T: Element> {
    Ordinary(Vec<T>),
    Private(Private<T>),
    Symmetric(Symmetric<T>),
}

impl<T: Element> Memory<T> {
    fn new(group: &Group, len: usize, kind: Buffers) -> Result<Memory<T>> {
        Ok(match kind {
            Buffers::Ordinary => Memory::Ordinary(vec![T::default(); len]),
            Buffers::Private => Memory::Private(Private::zeroed(len)),
            Buffers::Symmetric => Memory::Symmetric(group.symmetric(len)?),
        })
    }

    fn slice(&mut self) -> &mut [T] {
        match self {
            Memory::Ordinary(values) => values,
            Memory::Private(values) => values,
            Memory::Symmetric(values) => values,
        }
    }
}

/// The buffers of a case: many have only an input, which is their output too.
struct Pair<T: Element> {
    input: Memory<T>,
    output: Memory<T>,
}

impl<T: Small> Pair<T> {
    fn new(group: &Group, case: &Case) -> Result<Pair<T>> {
        let (n, me) = (group.size(), group.rank());
        // All-to-all, gather and scatter need whole pieces.
        let len = case.bytes / size_of::<T>() / n * n;
        let whole = case.bytes / size_of::<T>();
        // Symmetric buffers have the same length everywhere, so the largest share for everybody.
        let part = |total: usize| match case.buffers {
            Buffers::Ordinary | Buffers::Private => shard_range(total, n, me).len(),
            Buffers::Symmetric => shard_range(total, n, 0).len(),
        };
        let (input, output) = match case.kind {
            Collective::ReduceScatter => (whole, part(whole)),
            Collective::AllGather => (part(whole), whole),
            Collective::Gather => (len / n, len),
            Collective::Scatter => (len, len / n),
            Collective::AllToAll => (len, len),
            _ => (whole, 0),
        };
        Ok(Pair {
            input: Memory::new(group, input, case.buffers)?,
            output: Memory::new(group, output, case.buffers)?,
        })
    }

    fn fill(&mut self, input: impl Fn(usize) -> T, output: impl Fn(usize) -> T) {
        self.input.slice().iter_mut().enumerate().for_each(|(i, x)| *x = input(i));
        self.output.slice().iter_mut().enumerate().for_each(|(i, x)| *x = output(i));
    }
}

fn call<T: Small>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<()> {
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
            unreachable!("not offered")
        }
    }
}

/// The value a rank brings at an index: small, so that sums are exact in every type.
fn brought(rank: usize, index: usize) -> usize {
    (index + rank) % 3
}

/// Calls once on known values; gives the number of wrong ones on all ranks together.
fn check<T: Small>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<u64> {
    let (n, me) = (group.size(), group.rank());
    buffers.fill(|i| T::small(brought(me, i)), |_| T::small(9));
    call(group, case, buffers)?;
    let folded = |i: usize| {
        let values = (0..n).map(|r| brought(r, i));
        match case.op {
            Op::Sum => T::small(values.sum()),
            Op::Product => T::small(values.product()),
            Op::Min => T::small(values.min().unwrap_or(0)),
            Op::Max => T::small(values.max().unwrap_or(0)),
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
        Collective::AllReduce => count(input, &folded),
        Collective::Reduce if me == 0 => count(input, &folded),
        Collective::Reduce => count(input, &|i| T::small(brought(me, i))),
        Collective::Broadcast => count(input, &|i| T::small(brought(0, i))),
        Collective::ReduceScatter => count(&output[..own.len()], &|i| folded(own.start + i)),
        Collective::AllGather => {
            let starts: Vec<usize> = (0..n).map(|r| shard_range(whole, n, r).start).collect();
            count(output, &|i| T::small(brought(owner(i), i - starts[owner(i)])))
        }
        Collective::Gather if me == 0 => {
            count(output, &|i| T::small(brought(i / pieces, i % pieces)))
        }
        Collective::Scatter => count(output, &|i| T::small(brought(0, me * pieces + i))),
        Collective::AllToAll => {
            count(output, &|i| T::small(brought(i / pieces, me * pieces + i % pieces)))
        }
        _ => 0,
    };
    let mut total = [wrong];
    group.with_algo(None).all_reduce(&mut total, Op::Sum)?;
    Ok(total[0] as u64)
}

/// A mean as the type gives it: rounded for halves, cut for integers.
fn mean<T: Small>(sum: usize, n: usize) -> T {
    use std::any::TypeId;
    let quotient = sum as f64 / n as f64;
    let id = TypeId::of::<T>();
    let cast =
        |value: &dyn std::any::Any| *value.downcast_ref::<T>().expect("the type was compared");
    if id == TypeId::of::<f32>() {
        cast(&(sum as f32 / n as f32))
    } else if id == TypeId::of::<f64>() {
        cast(&quotient)
    } else if id == TypeId::of::<f16>() {
        cast(&f16::from_f32(sum as f32 / n as f32))
    } else if id == TypeId::of::<bf16>() {
        cast(&bf16::from_f32(sum as f32 / n as f32))
    } else {
        T::small(sum / n)
    }
}

/// Seconds per call.
fn time<T: Small>(group: &Group, case: &Case, buffers: &mut Pair<T>) -> Result<f64> {
    const WARM: f64 = 0.05;
    let mut calls = 1;
    let warm = loop {
        let seconds = batch(group, case, buffers, calls)?;
        if seconds >= WARM {
            break seconds;
        }
        calls *= 2;
    };
    let calls = ((case.seconds * calls as f64 / warm).ceil() as usize).max(5);
    Ok(batch(group, case, buffers, calls)? / calls as f64)
}

/// Seconds for so many calls, the longest of all ranks.
fn batch<T: Small>(group: &Group, case: &Case, buffers: &mut Pair<T>, calls: usize) -> Result<f64> {
    let plain = group.with_algo(None);
    plain.barrier()?;
    let start = Instant::now();
    for _ in 0..calls {
        call(group, case, buffers)?;
    }
    let mut seconds = [start.elapsed().as_secs_f64()];
    plain.all_reduce(&mut seconds, Op::Max)?;
    Ok(seconds[0])
}
