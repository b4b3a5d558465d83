//! One world of ranks, measured: all do the same at the same time, in rounds that go through everything in turn, so that
//! a machine that is busy for a while slows everything alike. Measures; what it means is `lockstep_sim::fit`'s.

use std::path::Path;
use std::time::Instant;

use lockstep_comm::{Op, World};
use lockstep_kernels::{Device, Dtype, Matmul, Operation, Tag, Tensor};
use lockstep_plan::Compute;
use lockstep_sim::{ByKind, Kind, Multiply, Spent};
use lockstep_trainer::Rank;
use serde::{Deserialize, Serialize};

use super::busy::{self, Ticks};
use super::references::{self, Reference};

/// What ranks saw: means over them, medians over rounds.
#[derive(Serialize, Deserialize)]
pub struct Watched {
    pub cores: usize,
    /// GB/s of a rank that copies what its cache holds, and what none does: read and written.
    pub copied: [f64; 2],
    pub multiplies: Vec<Multiply>,
    pub steps: Vec<Spent>,
    /// Of the cores, what other programs took in the rounds that count.
    pub others: f64,
}

/// Bytes that are copied.
const COPIED: [usize; 2] = [256 << 10, 96 << 20];

/// Layers by tokens, inputs and outputs: narrow and wide ones, in which the inner dimension is short and long.
const LAYERS: [[usize; 3]; 8] = [
    [512, 64, 192],
    [768, 96, 96],
    [512, 128, 512],
    [1024, 384, 128],
    [768, 256, 1024],
    [512, 640, 640],
    [640, 640, 2560],
    [640, 2560, 640],
];

/// At most so many rounds for one that counts.
const AGAIN: usize = 3;

/// All of it, written to `out` by the first rank.
pub fn run(world: &World, rounds: usize, out: &Path) -> anyhow::Result<()> {
    let references = references::all(world.size())?;
    let device = Device::cpu(references[0].plan.train.threads);
    let mut copies = COPIED.map(|bytes| Copies::new(&device, bytes));
    let mut multiplies = Multiplied::all(&device);
    let mut trained = Vec::new();
    for reference in &references {
        let rank = Rank::new(&reference.plan, world, device.clone())?;
        trained.push(Trained { reference, rank, number: 0, seen: Vec::new() });
    }
    // The first round warms up. Of the others those count in which nobody else worked, or where there are too few of
    // them, all.
    let (mut quiet, mut all) = (Vec::new(), Vec::new());
    for round in 0..=rounds * AGAIN {
        let since = Ticks::now();
        copies.iter_mut().try_for_each(|copies| copies.round(world, &device))?;
        multiplies.iter_mut().try_for_each(|multiply| multiply.round(world, &device))?;
        trained.iter_mut().try_for_each(|trained| trained.round(world, &device))?;
        let others = busy::others(world, since)?;
        if round > 0 {
            all.push((round, others));
        }
        if round > 0 && others <= busy::TOLERATED {
            quiet.push((round, others));
        }
        if quiet.len() == rounds {
            break;
        }
    }
    let counted = if quiet.len() == rounds { quiet } else { all };
    let others = counted.iter().map(|(_, others)| others).sum::<f64>() / counted.len() as f64;
    let counted: Vec<usize> = counted.iter().map(|(round, _)| *round).collect();
    let mut watched = Watched {
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        copied: [0.0; 2],
        multiplies: Vec::new(),
        steps: Vec::new(),
        others,
    };
    for (gbs, copies) in watched.copied.iter_mut().zip(&copies) {
        let seconds = mean(world, median(&counted, &copies.seen))?;
        *gbs = 2.0 * (copies.from.rows() * copies.from.cols() * 4) as f64 / seconds / 1e9;
    }
    for multiply in &multiplies {
        let seconds = mean(world, median(&counted, &multiply.seen))?;
        watched.multiplies.push(Multiply { seconds, ..multiply.what });
    }
    for trained in &trained {
        watched.steps.push(trained.spent(world, &counted)?);
    }
    if world.rank() == 0 {
        std::fs::write(out, serde_json::to_string(&watched)?)?;
    }
    world.barrier()?;
    Ok(())
}

/// A buffer into another.
struct Copies {
    from: Tensor,
    to: Tensor,
    times: usize,
    seen: Vec<Vec<f64>>,
}

impl Copies {
    fn new(device: &Device, bytes: usize) -> Copies {
        let buffer = || device.zeros(1, bytes / 4, Dtype::F32, Tag::Buffers);
        Copies { from: buffer(), to: buffer(), times: ((256 << 20) / bytes).max(1), seen: vec![] }
    }

    fn round(&mut self, world: &World, device: &Device) -> anyhow::Result<()> {
        let Copies { from, to, times, seen } = self;
        let mut copy = || device.copy(from.view(), to.view_mut());
        seen.push(vec![together(world, *times, &mut copy)?]);
        Ok(())
    }
}

/// A multiply, with operands of its own.
struct Multiplied {
    what: Multiply,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    times: usize,
    seen: Vec<Vec<f64>>,
}

impl Multiplied {
    /// The output of every layer, and the gradient of its weight.
    fn all(device: &Device) -> Vec<Multiplied> {
        let mut all = Vec::new();
        for [tokens, inputs, outputs] in LAYERS {
            for (compute, dtype) in [(Compute::F32, Dtype::F32), (Compute::Bf16, Dtype::Bf16)] {
                for sums in [false, true] {
                    let tensor = |rows, cols, dtype| device.zeros(rows, cols, dtype, Tag::Buffers);
                    let (a, b, out, dims) = match sums {
                        false => (
                            tensor(tokens, inputs, dtype),
                            tensor(outputs, inputs, dtype),
                            tensor(tokens, outputs, dtype),
                            [tokens, inputs, outputs],
                        ),
                        true => (
                            tensor(tokens, outputs, dtype),
                            tensor(tokens, inputs, dtype),
                            tensor(outputs, inputs, Dtype::F32),
                            [outputs, tokens, inputs],
                        ),
                    };
                    // So many that ranks which take turns on a core have all had theirs.
                    let work = 2.0 * dims.iter().product::<usize>() as f64;
                    let enough = if compute == Compute::F32 { 2e9 } else { 8e9 };
                    let times = ((enough / work) as usize).clamp(1, 500);
                    let what = Multiply { dims, compute, sums, seconds: 0.0 };
                    all.push(Multiplied { what, a, b, out, times, seen: vec![] });
                }
            }
        }
        all
    }

    fn round(&mut self, world: &World, device: &Device) -> anyhow::Result<()> {
        let Multiplied { what, a, b, out, times, seen } = self;
        let mut multiply = || {
            let (a, b) = (a.view(), b.view());
            device.matmul(match what.sums {
                false => Matmul::linear(a, b, out.view_mut()),
                true => Matmul { accumulate: true, ..Matmul::linear_dw(a, b, out.view_mut()) },
            })
        };
        seen.push(vec![together(world, *times, &mut multiply)?]);
        Ok(())
    }
}

/// A reference model in training.
struct Trained<'a> {
    reference: &'a Reference,
    rank: Rank<'a>,
    number: u64,
    /// By round and step: the step, its exchanges, those of whoever waited the least, the rest, and each kind.
    seen: Vec<Vec<[f64; 4 + Kind::ALL.len()]>>,
}

impl Trained<'_> {
    /// One step into the caches, and those that count.
    fn round(&mut self, world: &World, device: &Device) -> anyhow::Result<()> {
        let mut steps = Vec::new();
        for step in 0..=self.reference.steps {
            self.number += 1;
            device.meter().switch(true);
            let stepped = self.rank.step(&self.reference.file.source, self.number)?;
            device.meter().switch(false);
            let mut least = [stepped.exchange.as_secs_f64()];
            world.all_reduce(&mut least, Op::Min)?;
            let mut row = [0.0; 4 + Kind::ALL.len()];
            row[0] = stepped.time.as_secs_f64();
            row[1] = stepped.exchange.as_secs_f64();
            row[2] = least[0];
            for (place, operation) in row[4..].iter_mut().zip(operations()) {
                *place = device.meter().spent(operation).as_secs_f64();
            }
            row[3] = (row[0] - row[1] - row[4..].iter().sum::<f64>()).max(0.0);
            if step > 0 {
                steps.push(row);
            }
        }
        self.seen.push(steps);
        Ok(())
    }

    fn spent(&self, world: &World, rounds: &[usize]) -> anyhow::Result<Spent> {
        let mut means = [0.0; 4 + Kind::ALL.len()];
        for (at, place) in means.iter_mut().enumerate() {
            let column: Vec<Vec<f64>> =
                self.seen.iter().map(|steps| steps.iter().map(|row| row[at]).collect()).collect();
            *place = mean(world, median(rounds, &column))?;
        }
        let mut by = ByKind::default();
        by.copy_from_slice(&means[4..]);
        let [step, all, exchange] = [means[0], means[1], means[2].min(means[1])];
        let plan = self.reference.plan.clone();
        Ok(Spent { plan, step, by, exchange, waiting: all - exchange, rest: means[3] })
    }
}

/// The operations that a meter knows, in the order of the kinds.
fn operations() -> [Operation; Kind::ALL.len()] {
    Kind::ALL.map(|kind| match kind {
        Kind::Matmul => Operation::Matmul,
        Kind::Attention => Operation::Attention,
        Kind::Rope => Operation::Rope,
        Kind::Norm => Operation::Norm,
        Kind::Activation => Operation::Activation,
        Kind::Embedding => Operation::Embedding,
        Kind::Loss => Operation::Loss,
        Kind::Optimizer => Operation::Optimizer,
        Kind::Routing => Operation::Routing,
        Kind::Elementwise => Operation::Elementwise,
    })
}

/// Seconds of an act, of which all ranks begin so many at once.
fn together(world: &World, times: usize, act: &mut dyn FnMut()) -> anyhow::Result<f64> {
    world.barrier()?;
    let start = Instant::now();
    (0..times).for_each(|_| act());
    Ok(start.elapsed().as_secs_f64() / times as f64)
}

/// Of all that was seen in these rounds.
fn median(rounds: &[usize], seen: &[Vec<f64>]) -> f64 {
    let mut all: Vec<f64> = rounds.iter().flat_map(|round| &seen[*round]).copied().collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Over the ranks.
fn mean(world: &World, own: f64) -> anyhow::Result<f64> {
    let mut mean = [own];
    world.all_reduce(&mut mean, Op::Mean)?;
    Ok(mean[0])
}
