//! Every collective and message of a rank on device memory, equal to the host's result to the bit.

use crate::memory::DeviceVec;
use half::{bf16, f16};
use lockstep_comm::{DeviceEngine, DeviceGroup, DeviceOptions, Element, Group, Op, shard_range};
use lockstep_cuda::{Gpu, Stream};

/// Opens a group with an engine.
pub fn open(group: &Group, gpu: &Gpu, options: impl Into<DeviceOptions>) -> DeviceGroup {
    group.open_device(Some(gpu), options).unwrap();
    group.device().expect("an engine of device memory")
}

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
#[derive(Clone, Copy)]
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
    group: &'a Group,
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
        self.group.barrier().unwrap();
    }

    /// Compares with the host's result. The message names the case.
    fn expect<T: Number>(&self, what: &str, got: &DeviceVec<T>, want: &[T]) {
        let got = got.read(&self.stream);
        self.group.barrier().unwrap();
        let (name, ranks, offset) = (T::DTYPE.name(), self.group.size(), self.offset);
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
        let exact = self.device.engine() != DeviceEngine::Nccl;
        let ops = Op::ALL.into_iter().filter(|op| exact || *op != Op::Mean);
        ops.for_each(|op| self.check_reductions::<T>(len, op));
        self.check_copies::<T>(len);
        self.check_pieces::<T>(len);
    }

    fn check_reductions<T: Number>(&self, len: usize, op: Op) {
        let (me, ranks) = (self.group.rank(), self.group.size());
        let input = values::<T>(self.values, me, len, 0);
        let (mut sum, on_device) = (input.clone(), self.to_device(&input));
        self.group.all_reduce(&mut sum, op).unwrap();
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
        let (me, ranks) = (self.group.rank(), self.group.size());
        let shard = values::<T>(self.values, me, shard_range(len, ranks, me).len(), 1);
        let mut all = vec![T::of(0); len];
        self.group.all_gather(&shard, &mut all).unwrap();
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
        let (me, ranks) = (self.group.rank(), self.group.size());
        let all = ranks * len;
        let root = ranks - 1;
        let mine = values::<T>(self.values, me, len, 3);
        let mut gathered = vec![T::of(1); all];
        let (input, output) = (self.to_device(&mine), self.to_device(&gathered));
        self.group.gather(&mine, &mut gathered, root).unwrap();
        self.prepared();
        self.device.gather(&self.stream, input.slice(), output.slice(), root).unwrap();
        self.expect("gather", &output, &gathered);

        let whole = values::<T>(self.values, me, all, 4);
        let mut piece = vec![T::of(1); len];
        let (input, output) = (self.to_device(&whole), self.to_device(&piece));
        self.group.scatter(&whole, &mut piece, root).unwrap();
        self.prepared();
        self.device.scatter(&self.stream, input.slice(), output.slice(), root).unwrap();
        self.expect("scatter", &output, &piece);

        let mut exchanged = vec![T::of(1); all];
        self.group.all_to_all(&whole, &mut exchanged).unwrap();
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
        self.group.all_to_all_v(&pieces, &sent, &mut arrived, &received).unwrap();
        let (from, to) = ((input.slice(), &sent[..]), (output.slice(), &received[..]));
        self.prepared();
        self.device.all_to_all_v(&self.stream, from, to).unwrap();
        self.expect("all_to_all_v", &output, &arrived);
    }
}

/// All collectives of these lengths, at aligned and unaligned addresses.
pub fn check_lengths(
    group: &Group,
    gpu: &Gpu,
    options: impl Into<DeviceOptions>,
    lengths: &[usize],
) {
    let device = open(group, gpu, options);
    let stream = Stream::new(gpu.context.clone());
    // NCCL adds in another order than the host, and so does MPI on the host.
    let values = match device.engine() {
        DeviceEngine::Nccl | DeviceEngine::Mpi => Values::SmallIntegers,
        _ => Values::Fractions,
    };
    let mut rank = Rank { group, device, gpu, stream, offset: 0, values };
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

/// The rank sends to the next and receives from the one before, from two threads.
pub fn check_ring(group: &Group, gpu: &Gpu, engine: DeviceEngine) {
    let device = open(group, gpu, engine);
    let (me, ranks) = (group.rank(), group.size());
    let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    for len in [0usize, 1, 777, 300_000] {
        let out = Stream::new(gpu.context.clone());
        let own = vec![me as f32; len];
        let message = DeviceVec::new(gpu, &out, 1, &own);
        let inc = Stream::new(gpu.context.clone());
        let arrived = DeviceVec::new(gpu, &inc, 3, &vec![-1.0f32; len]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    device.send(&out, message.slice(), next).unwrap();
                }
                // Later operations may overwrite the message.
                message.write(&out, &vec![-2.0; len]);
            });
            for _ in 0..3 {
                device.receive(&inc, arrived.slice(), before).unwrap();
            }
        });
        assert_eq!(arrived.read(&inc), vec![before as f32; len]);
        out.synchronize();
    }
}
