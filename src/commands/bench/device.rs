//! `lockstep bench comm --device cuda`: collectives on device memory, with the columns of nccl-tests. The engines are
//! measured in turn, size by size.

use super::case::{FromSmall, input_value};
use super::table::bus_factor;
use crate::print::{print_error, print_line};
use anyhow::{Context, bail};
use half::bf16;
use lockstep_comm::{
    Collective, DeviceEngine, DeviceGroup, DeviceOptions, DeviceSlice, Dtype, Op, World,
    shard_range,
};
use lockstep_kernels::{Device, Tag, Tensor};
use serde::Serialize;
use std::time::Instant;

/// Collectives and sizes to measure.
pub struct DeviceBench<'a> {
    pub kinds: &'a [Collective],
    pub sizes: &'a [usize],
    pub dtype: Dtype,
    pub op: Op,
    pub seconds: f64,
    /// The world's engine, for the records.
    pub engine: &'static str,
    /// The ranks are processes, whose buffers NCCL can register.
    pub processes: bool,
    pub json: bool,
}

/// Seconds per call and wrong results, the same on all ranks.
#[derive(Clone, Copy)]
struct Measured {
    seconds: f64,
    wrong: u64,
}

/// One line of `--json`.
#[derive(Serialize)]
struct Record {
    op: &'static str,
    engine: &'static str,
    algo: &'static str,
    ranks: usize,
    dtype: &'static str,
    buffers: &'static str,
    in_place: bool,
    bytes: usize,
    time_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    wrong: u64,
}

/// Runs on every rank.
pub fn run(world: &World, bench: &DeviceBench<'_>) -> anyhow::Result<()> {
    match bench.dtype {
        Dtype::F32 => run_with::<f32>(world, bench),
        Dtype::Bf16 => run_with::<bf16>(world, bench),
        other => bail!("--device cuda measures f32 and bf16 (got {})", other.name()),
    }
}

fn run_with<T: FromSmall>(world: &World, bench: &DeviceBench<'_>) -> anyhow::Result<()> {
    let hosts = world.hosts();
    let local = hosts[..world.rank()].iter().filter(|h| **h == hosts[world.rank()]).count();
    let device = Device::cuda(local % Device::cuda_count()?.max(1))?;
    if bench.processes {
        // NCCL registers whole allocations.
        device.separate_chunks(0);
    }
    let groups = open_engines(world, &device, bench.processes)?;
    let first = world.rank() == 0;
    if first && !bench.json {
        print_header(world, &device, &groups);
    }
    let mut wrong = 0;
    for &kind in bench.kinds {
        for &bytes in bench.sizes {
            for group in &groups {
                let mut both = Vec::new();
                for in_place in [false, true] {
                    let case = Case::<T>::new(world, &device, bench, kind, (bytes, in_place));
                    let measured = case
                        .measure(group)
                        .with_context(|| format!("{} of {bytes} bytes", kind.name()))?;
                    wrong += measured.wrong;
                    both.push(measured);
                }
                if first {
                    print_rows(world, bench, kind, bytes, group, &both);
                }
            }
        }
    }
    if wrong > 0 {
        bail!("{wrong} results were wrong");
    }
    Ok(())
}

/// A group of all ranks for each engine that can be used; NCCL also with registered buffers.
fn open_engines(
    world: &World,
    device: &Device,
    processes: bool,
) -> anyhow::Result<Vec<DeviceGroup>> {
    let mut groups: Vec<DeviceGroup> = Vec::new();
    let engines = match world.is_over_mpi() {
        true => vec![DeviceEngine::Mpi],
        false => vec![DeviceEngine::Shared, DeviceEngine::Nccl],
    };
    let plain = engines.into_iter().map(DeviceOptions::from);
    let registered = DeviceOptions { engine: DeviceEngine::Nccl, register: true };
    for options in plain.chain(Some(registered).filter(|_| processes)) {
        if options.register && groups.iter().all(|group| group.engine() != DeviceEngine::Nccl) {
            continue;
        }
        let name = options.engine.name();
        let group = world.split(Some(0), 0, name)?.expect("all ranks have a color");
        match group.open_device(device.gpu().as_ref(), options) {
            Ok(choice) => {
                if let Some(warning) = choice.warning.filter(|_| world.rank() == 0) {
                    print_error!("warning: {warning}");
                }
                groups.extend(group.device());
            }
            Err(error @ lockstep_comm::Error::Misuse { .. })
                if world.rank() == 0 && !options.register =>
            {
                print_error!("note: {error}");
            }
            Err(lockstep_comm::Error::Misuse { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if groups.is_empty() {
        bail!("no engine for device memory can be used; omit --device to measure host memory");
    }
    Ok(groups)
}

/// One collective at one size. In place, input and output are the same memory, as in nccl-tests.
struct Case<'a, T> {
    world: &'a World,
    device: &'a Device,
    kind: Collective,
    op: Op,
    seconds: f64,
    /// Elements of the whole buffer.
    count: usize,
    input: DeviceSlice,
    output: DeviceSlice,
    buffers: [Tensor; 2],
    element: std::marker::PhantomData<T>,
}

impl<'a, T: FromSmall> Case<'a, T> {
    fn new(
        world: &'a World,
        device: &'a Device,
        bench: &DeviceBench<'_>,
        kind: Collective,
        (bytes, in_place): (usize, bool),
    ) -> Case<'a, T> {
        let (n, me) = (world.size(), world.rank());
        // Pieces of equal size.
        let count = bytes / size_of::<T>() / n * n;
        let own = shard_range(count, n, me);
        let tensor = || device.empty(1, count, T::DTYPE, Tag::Buffers);
        let buffers = [tensor(), tensor()];
        let slice = |tensor: &Tensor, range: std::ops::Range<usize>| {
            let view = tensor.view().part(range);
            // SAFETY: the case keeps its tensors until the stream is synchronized.
            unsafe { DeviceSlice::new(view.address(), view.len(), T::DTYPE) }
        };
        let (input, output) = match kind {
            Collective::ReduceScatter | Collective::Scatter => (0..count, own),
            Collective::AllGather | Collective::Gather => (own, 0..count),
            _ => (0..count, 0..count),
        };
        // An all-to-all has no form in place.
        let same = in_place && kind != Collective::AllToAll;
        let input = slice(&buffers[0], input);
        let output = slice(&buffers[usize::from(!same)], output);
        let (op, seconds) = (bench.op, bench.seconds);
        let element = std::marker::PhantomData;
        Case { world, device, kind, op, seconds, count, input, output, buffers, element }
    }

    fn call(&self, group: &DeviceGroup) -> lockstep_comm::Result<()> {
        let stream = self.device.stream().expect("a GPU has a stream");
        let (input, output) = (self.input, self.output);
        match self.kind {
            Collective::AllReduce => group.all_reduce(stream, input, output, self.op),
            Collective::Reduce => group.reduce(stream, input, output, self.op, 0),
            Collective::ReduceScatter => group.reduce_scatter(stream, input, output, self.op),
            Collective::AllGather => group.all_gather(stream, input, output),
            // One buffer; out of place means the other one.
            Collective::Broadcast => group.broadcast(stream, output, 0),
            Collective::Gather => group.gather(stream, input, output, 0),
            Collective::Scatter => group.scatter(stream, input, output, 0),
            Collective::AllToAll => group.all_to_all(stream, input, output),
            Collective::AllToAllV | Collective::Barrier | Collective::SendRecv => {
                unreachable!("not in OPS")
            }
        }
    }

    fn measure(mut self, group: &DeviceGroup) -> lockstep_comm::Result<Measured> {
        let wrong = self.check(group)?;
        let mut calls = 1;
        let warm_up = loop {
            let seconds = self.batch(group, calls)?;
            if seconds >= 0.02 || calls >= 4096 {
                break seconds;
            }
            calls *= 2;
        };
        let calls = ((self.seconds * calls as f64 / warm_up).ceil() as usize).clamp(5, 100_000);
        Ok(Measured { seconds: self.batch(group, calls)? / calls as f64, wrong })
    }

    /// Seconds of the slowest rank for `calls` calls, until the GPU has completed them.
    fn batch(&self, group: &DeviceGroup, calls: usize) -> lockstep_comm::Result<f64> {
        self.world.barrier()?;
        let start = Instant::now();
        for _ in 0..calls {
            self.call(group)?;
        }
        self.device.synchronize();
        let mut seconds = [start.elapsed().as_secs_f64()];
        self.world.all_reduce(&mut seconds, Op::Max)?;
        Ok(seconds[0])
    }

    /// Runs the collective once on known values and returns the number of wrong results on all ranks.
    fn check(&mut self, group: &DeviceGroup) -> lockstep_comm::Result<u64> {
        let (n, me, count) = (self.world.size(), self.world.rank(), self.count);
        let own = shard_range(count, n, me);
        let value = |rank: usize, i: usize| T::from_small(input_value(rank, i));
        let known: Vec<T> = (0..count).map(|i| value(me, i)).collect();
        for buffer in &mut self.buffers {
            self.device.write(buffer.view_mut(), &known);
        }
        self.device.synchronize();
        self.world.barrier()?;
        self.call(group)?;
        let in_place = self.input.address() == self.output.address()
            || (self.output.address() >= self.buffers[0].view().address()
                && self.output.address()
                    < self.buffers[0].view().address() + (count * size_of::<T>()) as u64);
        let result: Vec<T> = self.device.to_vec(self.buffers[usize::from(!in_place)].view());
        let sum = |i: usize| T::from_small((0..n).map(|r| input_value(r, i)).sum());
        let owner = |i: usize| (0..n).find(|r| shard_range(count, n, *r).contains(&i)).unwrap_or(0);
        let each = count / n;
        let wrong = |range: std::ops::Range<usize>, want: &dyn Fn(usize) -> T| {
            range.filter(|i| result[*i] != want(*i)).count() as i64
        };
        // Other operators than the sum are checked by the tests.
        let summed = self.op == Op::Sum;
        let wrong = match self.kind {
            Collective::AllReduce if summed => wrong(0..count, &sum),
            Collective::Reduce if summed && me == 0 => wrong(0..count, &sum),
            Collective::ReduceScatter if summed => wrong(own, &sum),
            Collective::AllGather => wrong(0..count, &|i| value(owner(i), i)),
            Collective::Gather if me == 0 => wrong(0..count, &|i| value(owner(i), i)),
            Collective::Broadcast => wrong(0..count, &|i| value(0, i)),
            Collective::Scatter => wrong(own, &|i| value(0, i)),
            Collective::AllToAll => wrong(0..count, &|i| value(i / each, me * each + i % each)),
            _ => 0,
        };
        let mut total = [wrong];
        self.world.all_reduce(&mut total, Op::Sum)?;
        Ok(total[0] as u64)
    }
}

/// The engine of a group as the table shows it.
fn engine(group: &DeviceGroup) -> String {
    let registered = if group.registers() { " registered" } else { "" };
    format!("{}{registered}", group.engine().name())
}

fn print_header(world: &World, device: &Device, groups: &[DeviceGroup]) {
    let gpu = device.cuda_report().map_or_else(String::new, |report| report.gpu);
    let engines: Vec<_> = groups.iter().map(engine).collect();
    print_line!(
        "{} ranks on {gpu}, device memory, engines {}",
        world.size(),
        engines.join(" and ")
    );
    print_line!("{:>71}{:>36}", "out-of-place", "in-place");
    print_line!(
        "{:>12} {:>12} {:<14} {:<17}{:>9} {:>8} {:>8} {:>6}  {:>9} {:>8} {:>8} {:>6}",
        "size (B)",
        "count",
        "operation",
        "engine",
        "time (us)",
        "algbw",
        "busbw",
        "#wrong",
        "time (us)",
        "algbw",
        "busbw",
        "#wrong"
    );
}

fn print_rows(
    world: &World,
    bench: &DeviceBench<'_>,
    kind: Collective,
    bytes: usize,
    group: &DeviceGroup,
    both: &[Measured],
) {
    let record = |(in_place, measured): (bool, &Measured)| {
        let algbw = bytes as f64 / measured.seconds / 1e9;
        Record {
            op: kind.name(),
            engine: bench.engine,
            algo: group.engine().name(),
            ranks: world.size(),
            dtype: bench.dtype.name(),
            buffers: if group.registers() { "registered" } else { "device" },
            in_place,
            bytes,
            time_us: measured.seconds * 1e6,
            algbw_gbs: algbw,
            busbw_gbs: algbw * bus_factor(kind, world.size()),
            wrong: measured.wrong,
        }
    };
    let records: Vec<Record> = [false, true].into_iter().zip(both).map(record).collect();
    if bench.json {
        for record in &records {
            print_line!("{}", serde_json::to_string(record).expect("a record is serializable"));
        }
        return;
    }
    let columns = |r: &Record| {
        format!("{:>9.2} {:>8.2} {:>8.2} {:>6}", r.time_us, r.algbw_gbs, r.busbw_gbs, r.wrong)
    };
    print_line!(
        "{:>12} {:>12} {:<14} {:<17}{}  {}",
        bytes,
        bytes / bench.dtype.bytes(),
        kind.name(),
        engine(group),
        columns(&records[0]),
        columns(&records[1])
    );
}
