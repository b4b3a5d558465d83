//! One pass of measurements, run by all ranks at the same time. A pass is short, so that it can be repeated when other
//! programs disturb it. `lockstep_sim::fit` interprets the results.

use std::path::Path;
use std::time::Instant;

use lockstep_comm::{Op, World};
use lockstep_kernels::{Device, Dtype, Matmul, OpClass, Tag, Tensor};
use lockstep_sim::{MeasuredMatmul, RankSkew};
use lockstep_trainer::Rank;
use serde::{Deserialize, Serialize};

use super::busy::{self, Ticks};
use super::references::{self, Reference};

/// Results of one pass, mean over ranks.
#[derive(Default, Serialize, Deserialize)]
pub struct Pass {
    /// Seconds to copy each size of [`COPY_BYTES`].
    pub copies: [f64; 2],
    pub matmuls: Vec<MeasuredMatmul>,
    /// The measured steps of each reference model.
    pub steps: Vec<Vec<StepTimes>>,
    /// Skew between ranks over all steps.
    pub skew: RankSkew,
    /// Fraction of the cores used by other programs.
    pub others: f64,
}

/// Times of one step in seconds.
#[derive(Clone, Copy, Default, Serialize, Deserialize)]
pub struct StepTimes {
    pub step: f64,
    /// Exposed communication of the rank with the least.
    pub comm: f64,
    /// Exposed communication beyond `comm`: waiting for slower ranks.
    pub waiting: f64,
    /// Neither operations nor communication.
    pub rest: f64,
    pub by_operation: [f64; OpClass::ALL.len()],
}

/// Sizes of the measured copies: one fits into a cache, the other does not.
pub const COPY_BYTES: [usize; 2] = [256 << 10, 96 << 20];

/// Linear layers (tokens, inputs, outputs), narrow and wide, with a short and a long inner dimension.
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

/// Warm-up steps: the first allocates memory, and the system merges it into larger pages after that.
const WARM_UP_STEPS: u64 = 2;

/// Measurement time per reference model in seconds, but at least one step.
const SECONDS: f64 = 0.3;

/// Runs one pass. Rank 0 writes the result to `out`.
pub fn run(world: &World, out: &Path) -> anyhow::Result<()> {
    let since = Ticks::now();
    let references = references::all(world.size())?;
    let device = Device::cpu(references[0].plan.train.threads);
    let mut pass = Pass::default();
    for (seconds, bytes) in pass.copies.iter_mut().zip(COPY_BYTES) {
        *seconds = time_copy(world, &device, bytes)?;
    }
    for [tokens, inputs, outputs] in LAYERS {
        for compute in [Dtype::F32, Dtype::Bf16] {
            // The output of the layer, and its weight gradient.
            let dims = [[tokens, inputs, outputs], [outputs, tokens, inputs]];
            for (dims, sums) in dims.into_iter().zip([false, true]) {
                let matmul = MeasuredMatmul { dims, compute, sums, seconds: 0.0 };
                pass.matmuls.push(time_matmul(world, &device, matmul)?);
            }
        }
    }
    let mut computing = 0.0;
    for reference in &references {
        pass.steps.push(time_steps(world, &device, reference, &mut computing)?);
    }
    let (mut mean, mut max) = ([computing], [computing]);
    world.all_reduce(&mut mean, Op::Mean)?;
    world.all_reduce(&mut max, Op::Max)?;
    pass.skew = RankSkew { computing: mean[0], waiting: max[0] - mean[0] };
    pass.others = busy::others(world, since)?;
    if world.rank() == 0 {
        std::fs::write(out, serde_json::to_string(&pass)?)?;
    }
    world.barrier()?;
    Ok(())
}

/// Seconds to copy a buffer.
fn time_copy(world: &World, device: &Device, bytes: usize) -> anyhow::Result<f64> {
    let buffer = || device.zeros(1, bytes / 4, Dtype::F32, Tag::Buffers);
    let (from, mut to) = (buffer(), buffer());
    let mut copy = || device.copy(from.view(), to.view_mut());
    time_on_all_ranks(world, ((256 << 20) / bytes).max(1), &mut copy)
}

/// Measures `matmul.seconds`.
fn time_matmul(
    world: &World,
    device: &Device,
    matmul: MeasuredMatmul,
) -> anyhow::Result<MeasuredMatmul> {
    let MeasuredMatmul { dims: [m, k, n], compute, sums, .. } = matmul;
    let dtype = compute;
    let tensor = |rows, cols, dtype| device.zeros(rows, cols, dtype, Tag::Buffers);
    let (a, b, mut out): (Tensor, Tensor, Tensor) = match sums {
        false => (tensor(m, k, dtype), tensor(n, k, dtype), tensor(m, n, dtype)),
        true => (tensor(k, m, dtype), tensor(k, n, dtype), tensor(m, n, Dtype::F32)),
    };
    // Long enough that ranks which share a core have all run.
    let min_flops = if compute == Dtype::F32 { 2e9 } else { 8e9 };
    let times = (min_flops / (2 * m * k * n) as f64) as usize;
    let mut multiply = || {
        let (a, b) = (a.view(), b.view());
        device.matmul(match sums {
            false => Matmul::linear(a, b, out.view_mut()),
            true => Matmul { accumulate: true, ..Matmul::linear_dw(a, b, out.view_mut()) },
        })
    };
    Ok(MeasuredMatmul {
        seconds: time_on_all_ranks(world, times.clamp(1, 500), &mut multiply)?,
        ..matmul
    })
}

/// Measures steps of a reference model. Adds the time that this rank computes to `computing`.
fn time_steps(
    world: &World,
    device: &Device,
    reference: &Reference,
    computing: &mut f64,
) -> anyhow::Result<Vec<StepTimes>> {
    let mut rank = Rank::new(&reference.plan, world, device.clone())?;
    let (mut steps, mut total) = (Vec::new(), [0.0]);
    for number in 1.. {
        device.meter().switch(true);
        let stepped = rank.step(&reference.file.source, number)?;
        device.meter().switch(false);
        let (step, exposed) = (stepped.time.as_secs_f64(), stepped.exposed_comm.as_secs_f64());
        let by_operation =
            OpClass::ALL.map(|operation| device.meter().spent(operation).as_secs_f64());
        let operations = by_operation.iter().sum::<f64>();
        let rest = (step - exposed - operations).max(0.0);
        if number <= WARM_UP_STEPS {
            continue;
        }
        let mut comm = [exposed];
        world.all_reduce(&mut comm, Op::Min)?;
        let [comm] = comm;
        let times = StepTimes { step, comm, waiting: exposed - comm, rest, by_operation };
        steps.push(times.mean(world)?);
        *computing += operations;
        // Ranks agree on when to stop.
        total[0] += step;
        world.all_reduce(&mut total, Op::Max)?;
        if total[0] >= SECONDS {
            break;
        }
    }
    Ok(steps)
}

impl StepTimes {
    /// Mean over ranks.
    fn mean(self, world: &World) -> anyhow::Result<StepTimes> {
        let mut all = self.to_array();
        world.all_reduce(&mut all, Op::Mean)?;
        Ok(StepTimes::from_array(all))
    }

    pub fn to_array(self) -> [f64; 4 + OpClass::ALL.len()] {
        let mut all = [0.0; 4 + OpClass::ALL.len()];
        all[..4].copy_from_slice(&[self.step, self.comm, self.waiting, self.rest]);
        all[4..].copy_from_slice(&self.by_operation);
        all
    }

    pub fn from_array(array: [f64; 4 + OpClass::ALL.len()]) -> StepTimes {
        let [step, comm, waiting, rest, by_operation @ ..] = array;
        StepTimes { step, comm, waiting, rest, by_operation }
    }
}

/// Seconds per call, mean over ranks. All ranks start at the same time, after one warm-up call.
fn time_on_all_ranks(world: &World, times: usize, call: &mut dyn FnMut()) -> anyhow::Result<f64> {
    call();
    world.barrier()?;
    let start = Instant::now();
    (0..times).for_each(|_| call());
    let mut mean = [start.elapsed().as_secs_f64() / times as f64];
    world.all_reduce(&mut mean, Op::Mean)?;
    Ok(mean[0])
}
