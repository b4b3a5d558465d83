//! Engines × collectives × types × operators × 1–8 ranks × lengths × alignments, equal to the host's result to the bit.

use crate::memory::DeviceVec;
use crate::processes::{on_processes, shared_memory};
use crate::{gpu, open};
use half::{bf16, f16};
use lockstep_comm::{DeviceEngine, DeviceGroup, Element, Op, World, on_threads, shard_range};
use lockstep_cuda::{Gpu, Stream};

const LENGTHS: [usize; 6] = [0, 1, 7, 64, 4099, 70_000];

/// A number type of the tests.
trait Number: Element + PartialEq {
    fn of(n: u32) -> Self;
    fn small(n: u32) -> Self;
}

macro_rules! numbers {
    ($($t:ty => $of:expr, $small:expr;)*) => {$(
        impl Number for $t {
            fn of(n: u32) -> $t {
                ($of)(n)
            }

            fn small(n: u32) -> $t {
                ($small)(n)
            }
        }
    )*};
}
// Fractions, so that the order of additions matters.
numbers!(
    f32 => |n| n as f32 / 1000.0 - 30.0, |n| n as f32;
    f64 => |n| n as f64 / 1000.0 - 30.0, f64::from;
    f16 => |n| f16::from_f32(n as f32 / 1000.0 - 30.0), |n| f16::from_f32(n as f32);
    bf16 => |n| bf16::from_f32(n as f32 / 1000.0 - 30.0), |n| bf16::from_f32(n as f32);
    i32 => |n| n as i32 - 30_000, |n| n as i32;
    i64 => |n| i64::from(n) - 30_000, i64::from;
    u8 => |n| n as u8, |n| n as u8;
    u32 => |n| n, |n| n;
);

/// Values whose sums depend on the order of additions, or small integers whose sums are exact.
#[derive(Clone, Copy, PartialEq)]
enum Values {
    Fractions,
    SmallIntegers,
}

fn values<T: Number>(kind: Values, rank: usize, len: usize, seed: u32) -> Vec<T> {
    let mut state = 12_345 + 77 * rank as u32 + seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match kind {
            Values::Fractions => T::of((state >> 8) % 60_000),
            Values::SmallIntegers => T::small((state >> 8) % 3),
        }
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// One rank of a test.
struct Rank<'a> {
    world: &'a World,
    device: DeviceGroup,
    gpu: &'a Gpu,
    stream: Stream,
    /// Elements before each buffer.
    offset: usize,
    values: Values,
}

impl Rank<'_> {
    fn to_device<T: Number>(&self, values: &[T]) -> DeviceVec<T> {
        DeviceVec::new(self.gpu, &self.stream, self.offset, values)
    }

    /// All ranks have prepared their buffers. Allocations wait for all kernels of a process, and kernels of NCCL for the
    /// other ranks.
    fn prepared(&self) {
        self.stream.synchronize();
        self.world.barrier().unwrap();
    }

    /// Compares with the host's result. The message names the case.
    fn expect<T: Number>(&self, what: &str, got: &DeviceVec<T>, want: &[T]) {
        let got = got.read(&self.stream);
        self.world.barrier().unwrap();
        let (name, ranks, offset) = (T::DTYPE.name(), self.world.size(), self.offset);
        let wrong = (0..want.len()).find(|i| got[*i] != want[*i]);
        assert_eq!(
            wrong.map(|i| (i, got[i], want[i])),
            None,
            "{what}, {name}, {} elements at offset {offset}, {ranks} ranks",
            want.len()
        );
    }

    fn check<T: Number>(&self, len: usize) {
        // NCCL multiplies by 1/n before it adds, which is not exact.
        let ops =
            Op::ALL.into_iter().filter(|op| self.values == Values::Fractions || *op != Op::Mean);
        ops.for_each(|op| self.check_reductions::<T>(len, op));
        self.check_copies::<T>(len);
        self.check_pieces::<T>(len);
    }

    fn check_reductions<T: Number>(&self, len: usize, op: Op) {
        let (me, ranks) = (self.world.rank(), self.world.size());
        let input = values::<T>(self.values, me, len, 0);
        let (mut sum, on_device) = (input.clone(), self.to_device(&input));
        self.world.all_reduce(&mut sum, op).unwrap();
        let output = self.to_device(&vec![T::of(1); len]);
        self.prepared();
        self.device.all_reduce(&self.stream, on_device.slice(), output.slice(), op).unwrap();
        self.expect(&format!("all_reduce {}", op.name()), &output, &sum);
        self.expect("input of all_reduce", &on_device, &input);
        self.prepared();
        self.device.all_reduce(&self.stream, on_device.slice(), on_device.slice(), op).unwrap();
        self.expect(&format!("all_reduce in place {}", op.name()), &on_device, &sum);

        on_device.write(&self.stream, &input);
        let root = ranks / 2;
        self.prepared();
        self.device.reduce(&self.stream, on_device.slice(), on_device.slice(), op, root).unwrap();
        self.expect("reduce", &on_device, if me == root { &sum } else { &input });

        on_device.write(&self.stream, &input);
        let own = shard_range(len, ranks, me);
        let shard = self.to_device(&vec![T::of(1); own.len()]);
        self.prepared();
        self.device.reduce_scatter(&self.stream, on_device.slice(), shard.slice(), op).unwrap();
        self.expect("reduce_scatter", &shard, &sum[own]);
    }

    fn check_copies<T: Number>(&self, len: usize) {
        let (me, ranks) = (self.world.rank(), self.world.size());
        let shard = values::<T>(self.values, me, shard_range(len, ranks, me).len(), 1);
        let mut all = vec![T::of(0); len];
        self.world.all_gather(&shard, &mut all).unwrap();
        let (input, output) = (self.to_device(&shard), self.to_device(&vec![T::of(1); len]));
        self.prepared();
        self.device.all_gather(&self.stream, input.slice(), output.slice()).unwrap();
        self.expect("all_gather", &output, &all);

        for root in [0, ranks - 1] {
            let mine = values::<T>(self.values, me, len, 2);
            let buffer = self.to_device(&mine);
            self.prepared();
            self.device.broadcast(&self.stream, buffer.slice(), root).unwrap();
            self.expect("broadcast", &buffer, &values::<T>(self.values, root, len, 2));
        }
    }

    /// `len` elements for each member.
    fn check_pieces<T: Number>(&self, len: usize) {
        let (me, ranks) = (self.world.rank(), self.world.size());
        let all = ranks * len;
        let root = ranks - 1;
        let mine = values::<T>(self.values, me, len, 3);
        let mut gathered = vec![T::of(1); all];
        let (input, output) = (self.to_device(&mine), self.to_device(&gathered));
        self.world.gather(&mine, &mut gathered, root).unwrap();
        self.prepared();
        self.device.gather(&self.stream, input.slice(), output.slice(), root).unwrap();
        self.expect("gather", &output, &gathered);

        let whole = values::<T>(self.values, me, all, 4);
        let mut piece = vec![T::of(1); len];
        let (input, output) = (self.to_device(&whole), self.to_device(&piece));
        self.world.scatter(&whole, &mut piece, root).unwrap();
        self.prepared();
        self.device.scatter(&self.stream, input.slice(), output.slice(), root).unwrap();
        self.expect("scatter", &output, &piece);

        let mut exchanged = vec![T::of(1); all];
        self.world.all_to_all(&whole, &mut exchanged).unwrap();
        let output = self.to_device(&vec![T::of(1); all]);
        self.prepared();
        self.device.all_to_all(&self.stream, input.slice(), output.slice()).unwrap();
        self.expect("all_to_all", &output, &exchanged);

        // Rank p sends (p + q) % 3 tenths of `len` to rank q.
        let count = |from: usize, to: usize| len * ((from + to) % 3) / 10;
        let sent: Vec<usize> = (0..ranks).map(|q| count(me, q)).collect();
        let received: Vec<usize> = (0..ranks).map(|p| count(p, me)).collect();
        let pieces = values::<T>(self.values, me, sent.iter().sum(), 5);
        let mut arrived = vec![T::of(1); received.iter().sum()];
        let (input, output) = (self.to_device(&pieces), self.to_device(&arrived));
        self.world.all_to_all_v(&pieces, &sent, &mut arrived, &received).unwrap();
        let (from, to) = ((input.slice(), &sent[..]), (output.slice(), &received[..]));
        self.prepared();
        self.device.all_to_all_v(&self.stream, from, to).unwrap();
        self.expect("all_to_all_v", &output, &arrived);
    }
}

fn check_rank(world: &World, gpu: &Gpu, engine: DeviceEngine) {
    check_lengths(world, gpu, engine, &LENGTHS);
}

fn check_lengths(world: &World, gpu: &Gpu, engine: DeviceEngine, lengths: &[usize]) {
    let device = open(world, gpu, engine);
    let stream = Stream::new(gpu.context.clone());
    // NCCL adds in another order than the host.
    let values = match engine {
        DeviceEngine::Nccl => Values::SmallIntegers,
        _ => Values::Fractions,
    };
    let mut rank = Rank { world, device, gpu, stream, offset: 0, values };
    for offset in [0, 1] {
        rank.offset = offset;
        for &len in lengths {
            rank.check::<f32>(len);
            rank.check::<bf16>(len);
            if offset == 0 && len < 5000 {
                rank.check::<f64>(len);
                rank.check::<f16>(len);
                rank.check::<i32>(len);
                rank.check::<i64>(len);
                rank.check::<u8>(len);
                rank.check::<u32>(len);
            }
        }
    }
}

#[test]
fn collectives_of_threads_on_one_gpu_equal_those_of_the_host() {
    let Some(gpu) = gpu("collectives_of_threads_on_one_gpu") else { return };
    for ranks in 1..=8 {
        on_threads(ranks, |world| check_rank(&world, &gpu, DeviceEngine::Shared));
        println!("shared, threads: {ranks} ranks are exact");
    }
}

/// Without MPS, the GPU switches between the processes in time slices, so there are few lengths.
#[test]
fn collectives_of_processes_on_one_gpu_equal_those_of_the_host() {
    let Some(gpu) = gpu("collectives_of_processes_on_one_gpu") else { return };
    let test = "collectives::collectives_of_processes_on_one_gpu_equal_those_of_the_host";
    for ranks in [2, 4] {
        let begun = std::time::Instant::now();
        on_processes(test, &format!("{ranks}"), shared_memory(ranks), |world| {
            check_lengths(&world, &gpu, DeviceEngine::Shared, &[0, 7, 70_001]);
        });
        println!("shared, {ranks} processes are exact, {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// Needs NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
#[test]
fn collectives_of_nccl_on_one_gpu_equal_those_of_the_host() {
    let Some(gpu) = gpu("collectives_of_nccl_on_one_gpu") else { return };
    for ranks in [1, 2, 3, 4, 8] {
        on_threads(ranks, |world| {
            if let Err(error) = world.open_device(Some(&gpu), DeviceEngine::Nccl) {
                return println!("skipped: {error}");
            }
            check_rank(&world, &gpu, DeviceEngine::Nccl);
            println!("nccl, threads: rank {} of {ranks} is exact", world.rank());
        });
    }
}

/// Calls follow each other without the host waiting for any: every call sees the result of the one before.
#[test]
fn calls_are_ordered_on_the_stream() {
    let Some(gpu) = gpu("calls_are_ordered_on_the_stream") else { return };
    on_threads(4, |world| {
        let device = open(&world, &gpu, DeviceEngine::Auto);
        assert_eq!(device.engine(), DeviceEngine::Shared);
        let stream = Stream::new(gpu.context.clone());
        let x = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 100_000]);
        // Powers of two: exact.
        for _ in 0..50 {
            device.all_reduce(&stream, x.slice(), x.slice(), Op::Sum).unwrap();
            device.all_reduce(&stream, x.slice(), x.slice(), Op::Mean).unwrap();
        }
        assert_eq!(x.read(&stream), vec![4f32.powi(50); 100_000]);
    });
}
