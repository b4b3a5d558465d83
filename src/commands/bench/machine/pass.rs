//! One pass of one world of ranks through all that is measured, in which all do the same at the same time. It is short:
//! a machine that is busy for a while is asked again later. Measures; what it means is `lockstep_sim::fit`'s.

use std::path::Path;
use std::time::Instant;

use lockstep_comm::{Op, World};
use lockstep_kernels::{Device, Dtype, Matmul, OpClass, Tag, Tensor};
use lockstep_sim::{MeasuredMatmul, RankSkew};
use lockstep_trainer::Rank;
use serde::{Deserialize, Serialize};

use super::busy::{self, Ticks};
use super::references::{self, Reference};

/// What ranks saw: means over them.
#[derive(Default, Serialize, Deserialize)]
pub struct Pass {
    /// Seconds of copying what a cache holds, and what none does.
    pub copies: [f64; 2],
    pub multiplies: Vec<MeasuredMatmul>,
    /// Of every reference, the steps that count.
    pub steps: Vec<Vec<Row>>,
    /// Of all these steps together.
    pub together: RankSkew,
    /// Of the cores, what other programs took.
    pub others: f64,
}

/// Seconds of a step.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct Row {
    pub step: f64,
    /// Exchanges of whoever waited the least, and what this rank waited more.
    pub exchange: f64,
    pub waiting: f64,
    /// Neither computing nor exchanging.
    pub rest: f64,
    pub by: [f64; OpClass::ALL.len()],
}

/// Bytes that are copied.
pub const COPIED: [usize; 2] = [256 << 10, 96 << 20];

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

/// Steps before those that count: memory is laid out in the first, and in larger pages after it.
const WARM: u64 = 2;

/// Seconds of steps that count, of each reference: as long for each, and one step at least.
const COUNTED: f64 = 0.3;

/// All of it, written to `out` by the first rank.
pub fn run(world: &World, out: &Path) -> anyhow::Result<()> {
    let since = Ticks::now();
    let references = references::all(world.size())?;
    let device = Device::cpu(references[0].plan.train.threads);
    let mut pass = Pass::default();
    for (seconds, bytes) in pass.copies.iter_mut().zip(COPIED) {
        *seconds = copied(world, &device, bytes)?;
    }
    for [tokens, inputs, outputs] in LAYERS {
        for compute in [Dtype::F32, Dtype::Bf16] {
            // The output of a layer, and the gradient of its weight.
            let dims = [[tokens, inputs, outputs], [outputs, tokens, inputs]];
            for (dims, sums) in dims.into_iter().zip([false, true]) {
                let what = MeasuredMatmul { dims, compute, sums, seconds: 0.0 };
                pass.multiplies.push(multiplied(world, &device, what)?);
            }
        }
    }
    let mut own = 0.0;
    for reference in &references {
        pass.steps.push(trained(world, &device, reference, &mut own)?);
    }
    let (mut mean, mut most) = ([own], [own]);
    world.all_reduce(&mut mean, Op::Mean)?;
    world.all_reduce(&mut most, Op::Max)?;
    pass.together = RankSkew { computing: mean[0], waiting: most[0] - mean[0] };
    pass.others = busy::others(world, since)?;
    if world.rank() == 0 {
        std::fs::write(out, serde_json::to_string(&pass)?)?;
    }
    world.barrier()?;
    Ok(())
}

/// Seconds of copying a buffer into another.
fn copied(world: &World, device: &Device, bytes: usize) -> anyhow::Result<f64> {
    let buffer = || device.zeros(1, bytes / 4, Dtype::F32, Tag::Buffers);
    let (from, mut to) = (buffer(), buffer());
    let mut copy = || device.copy(from.view(), to.view_mut());
    together(world, ((256 << 20) / bytes).max(1), &mut copy)
}

/// A multiply, with what it took.
fn multiplied(
    world: &World,
    device: &Device,
    what: MeasuredMatmul,
) -> anyhow::Result<MeasuredMatmul> {
    let MeasuredMatmul { dims: [m, k, n], compute, sums, .. } = what;
    let dtype = compute;
    let tensor = |rows, cols, dtype| device.zeros(rows, cols, dtype, Tag::Buffers);
    let (a, b, mut out): (Tensor, Tensor, Tensor) = match sums {
        false => (tensor(m, k, dtype), tensor(n, k, dtype), tensor(m, n, dtype)),
        true => (tensor(k, m, dtype), tensor(k, n, dtype), tensor(m, n, Dtype::F32)),
    };
    // So many that ranks which take turns on a core have all had theirs.
    let enough = if compute == Dtype::F32 { 2e9 } else { 8e9 };
    let times = (enough / (2 * m * k * n) as f64) as usize;
    let mut multiply = || {
        let (a, b) = (a.view(), b.view());
        device.matmul(match sums {
            false => Matmul::linear(a, b, out.view_mut()),
            true => Matmul { accumulate: true, ..Matmul::linear_dw(a, b, out.view_mut()) },
        })
    };
    Ok(MeasuredMatmul { seconds: together(world, times.clamp(1, 500), &mut multiply)?, ..what })
}

/// Steps of a reference model: some that make what is used again later, and those that count. What this rank computes
/// in those is added to `own`.
fn trained(
    world: &World,
    device: &Device,
    reference: &Reference,
    own: &mut f64,
) -> anyhow::Result<Vec<Row>> {
    let mut rank = Rank::new(&reference.plan, world, device.clone())?;
    let (mut rows, mut counted) = (Vec::new(), [0.0]);
    for number in 1.. {
        device.meter().switch(true);
        let stepped = rank.step(&reference.file.source, number)?;
        device.meter().switch(false);
        let (step, all) = (stepped.time.as_secs_f64(), stepped.exposed_comm.as_secs_f64());
        let by = OpClass::ALL.map(|operation| device.meter().spent(operation).as_secs_f64());
        let rest = (step - all - by.iter().sum::<f64>()).max(0.0);
        if number <= WARM {
            continue;
        }
        let mut least = [all];
        world.all_reduce(&mut least, Op::Min)?;
        let row = Row { step, exchange: least[0], waiting: all - least[0], rest, by };
        rows.push(row.mean(world)?);
        *own += by.iter().sum::<f64>();
        // Ranks agree on when to stop.
        counted[0] += step;
        world.all_reduce(&mut counted, Op::Max)?;
        if counted[0] >= COUNTED {
            break;
        }
    }
    Ok(rows)
}

impl Row {
    /// Over the ranks.
    fn mean(self, world: &World) -> anyhow::Result<Row> {
        let mut all = self.numbers();
        world.all_reduce(&mut all, Op::Mean)?;
        Ok(Row::of(all))
    }

    pub fn numbers(&self) -> [f64; 4 + OpClass::ALL.len()] {
        let mut all = [0.0; 4 + OpClass::ALL.len()];
        all[..4].copy_from_slice(&[self.step, self.exchange, self.waiting, self.rest]);
        all[4..].copy_from_slice(&self.by);
        all
    }

    pub fn of([step, exchange, waiting, rest, by @ ..]: [f64; 4 + OpClass::ALL.len()]) -> Row {
        Row { step, exchange, waiting, rest, by }
    }
}

/// Seconds of an act, of which all ranks begin so many at once after one that warms up: the mean over them.
fn together(world: &World, times: usize, act: &mut dyn FnMut()) -> anyhow::Result<f64> {
    act();
    world.barrier()?;
    let start = Instant::now();
    (0..times).for_each(|_| act());
    let mut mean = [start.elapsed().as_secs_f64() / times as f64];
    world.all_reduce(&mut mean, Op::Mean)?;
    Ok(mean[0])
}
