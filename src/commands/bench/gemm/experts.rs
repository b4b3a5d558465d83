//! The multiplications of a layer of experts on a GPU: one product per expert, and one launch for all.

use std::process::ExitCode;

use anyhow::bail;
use lockstep_kernels::{
    Device, Dtype, GroupedMatmul, RandomKey, RowGroups, Stack, Tag, Tensor, View,
};

use super::{Args, Order, Shape};

#[derive(serde::Serialize)]
struct Record {
    order: Order,
    experts: usize,
    tokens: usize,
    outputs: usize,
    inputs: usize,
    /// Mean time of one product per expert in microseconds, measured by events of the GPU.
    each_us: f64,
    /// Mean time of one launch for all experts.
    grouped_us: f64,
    tflops: f64,
    /// The largest difference between both, as a part of the largest number.
    difference: f64,
}

/// Differences beyond some roundings of bf16 are wrong results.
const TOLERANCE: f64 = 1.0 / 64.0;

pub fn run(args: &Args, experts: usize) -> anyhow::Result<ExitCode> {
    if args.dtype != Dtype::Bf16 {
        bail!("--experts needs --dtype bf16: grouped products are in bf16");
    }
    let gpu = Device::cuda(0)?;
    if !args.json {
        println!("{experts} experts, {}", args.dtype);
        println!(
            "{:>5} {:>7} {:>7} {:>7} {:>14} {:>13} {:>8} {:>6} {:>10}",
            "order",
            "tokens",
            "outputs",
            "inputs",
            "each (µs)",
            "grouped (µs)",
            "TFLOP/s",
            "ratio",
            "difference"
        );
    }
    let mut wrong = 0;
    for &shape in &args.shapes {
        for &order in &args.orders {
            let mut case = Case::new(&gpu, shape, order, experts);
            let [each_us, grouped_us] = case.times(args.seconds)?;
            let difference = case.difference();
            wrong += usize::from(difference > TOLERANCE || difference.is_nan());
            let Shape { tokens, outputs, inputs } = shape;
            let tflops = 2e-6 * (tokens * outputs * inputs) as f64 / grouped_us;
            let record = Record {
                order,
                experts,
                tokens,
                outputs,
                inputs,
                each_us,
                grouped_us,
                tflops,
                difference,
            };
            print(&record, args.json)?;
        }
    }
    if wrong > 0 {
        bail!("{wrong} results were wrong");
    }
    Ok(ExitCode::SUCCESS)
}

fn print(record: &Record, json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string(record)?);
        return Ok(());
    }
    println!(
        "{:>5} {:>7} {:>7} {:>7} {:>14.1} {:>13.1} {:>8.1} {:>6.2} {:>10.1e}",
        format!("{:?}", record.order).to_lowercase(),
        record.tokens,
        record.outputs,
        record.inputs,
        record.each_us,
        record.grouped_us,
        record.tflops,
        record.each_us / record.grouped_us,
        record.difference
    );
    Ok(())
}

/// One multiplication of all experts, with random operands.
struct Case<'a> {
    gpu: &'a Device,
    order: Order,
    groups: RowGroups,
    stack: Stack,
    rows: [Tensor; 2],
    weights: Tensor,
    /// The first for one product per expert, the second for one launch.
    outputs: [Tensor; 2],
}

impl<'a> Case<'a> {
    fn new(gpu: &'a Device, shape: Shape, order: Order, experts: usize) -> Case<'a> {
        let Shape { tokens, outputs, inputs } = shape;
        let random = |rows, cols, stream, deviation: f32| {
            let mut tensor = gpu.empty(rows, cols, Dtype::Bf16, Tag::Buffers);
            gpu.normal(tensor.view_mut(), RandomKey { seed: 0, stream }, 0, deviation);
            tensor
        };
        let mut starts = gpu.empty(1, experts + 1, Dtype::U32, Tag::Buffers);
        gpu.write(starts.view_mut(), &starts_of(tokens, experts));
        let (rows, cols) = (outputs, inputs);
        let stack = Stack { first: 0, stride: rows * cols, count: experts, rows, cols };
        let (x, dy) = (random(tokens, inputs, 0, 1.0), random(tokens, outputs, 1, 1.0));
        let output = || match order {
            Order::Nt => gpu.zeros(tokens, outputs, Dtype::Bf16, Tag::Buffers),
            Order::Nn => gpu.zeros(tokens, inputs, Dtype::Bf16, Tag::Buffers),
            Order::Tn => gpu.zeros(1, experts * stack.stride, Dtype::F32, Tag::Buffers),
        };
        Case {
            gpu,
            order,
            groups: RowGroups::new(starts),
            stack,
            rows: [x, dy],
            weights: random(1, experts * stack.stride, 2, (inputs as f32).powf(-0.5)),
            outputs: [output(), output()],
        }
    }

    /// Returns whether one launch did all experts.
    fn multiply(&mut self, grouped: bool) -> bool {
        let Case { gpu, order, groups, stack, rows: [x, dy], weights, outputs } = self;
        gpu.set_grouped_matmul(Some(grouped));
        let (x, dy, weights) = (x.view(), dy.view(), (weights.view(), *stack));
        let out = outputs[usize::from(grouped)].view_mut();
        gpu.grouped_matmul(match order {
            Order::Nt => GroupedMatmul::linear(groups, weights, x, out),
            Order::Nn => GroupedMatmul::linear_dx(groups, weights, dy, out),
            Order::Tn => GroupedMatmul::linear_dw(groups, (out, *stack), dy, x),
        })
    }

    /// Microseconds of one product per expert, and of one launch. The faster of two rounds counts.
    fn times(&mut self, seconds: f64) -> anyhow::Result<[f64; 2]> {
        if !self.multiply(true) {
            bail!(
                "no grouped product for this GPU and shape: it needs Hopper, and sizes that are multiples of 8"
            );
        }
        let mut run = |grouped: bool, calls: usize| {
            let start = self.gpu.record();
            (0..calls).for_each(|_| {
                self.multiply(grouped);
            });
            self.gpu.record().elapsed_since(&start).as_secs_f64() / calls as f64
        };
        let mut best = [f64::INFINITY; 2];
        for _ in 0..2 {
            for (best, grouped) in best.iter_mut().zip([false, true]) {
                // The first call chooses algorithms.
                run(grouped, 1);
                let calls = (seconds / 2.0 / run(grouped, 3)).clamp(5.0, 1e5) as usize;
                *best = best.min(1e6 * run(grouped, calls));
            }
        }
        Ok(best)
    }

    fn difference(&self) -> f64 {
        let wide = |view: View<'_>| -> Vec<f32> {
            let mut wide = self.gpu.empty(view.rows(), view.cols(), Dtype::F32, Tag::Buffers);
            self.gpu.cast(view, wide.view_mut());
            self.gpu.to_vec(wide.view())
        };
        let [each, grouped] = [&self.outputs[0], &self.outputs[1]].map(|out| wide(out.view()));
        let largest = each.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let most = each.iter().zip(&grouped).map(|(a, b)| f64::from((a - b).abs()));
        // A number that is not one is larger than all.
        most.fold(0.0, |most, d| if d > most || d.is_nan() { d } else { most }) / f64::from(largest)
    }
}

/// The first row of each expert and the end, for numbers of rows that differ by up to a factor of 2.5.
fn starts_of(tokens: usize, experts: usize) -> Vec<u32> {
    let parts: Vec<usize> = (0..experts).map(|expert| 4 + expert * 5 % 7).collect();
    let sum: usize = parts.iter().sum();
    let ends = parts.iter().scan(0, |end, part| {
        *end += part;
        Some((tokens * *end / sum) as u32)
    });
    std::iter::once(0).chain(ends).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_share_all_rows_unevenly() {
        let starts = starts_of(1000, 8);
        assert_eq!((starts[0], starts[8]), (0, 1000));
        let rows: Vec<u32> = starts.windows(2).map(|two| two[1] - two[0]).collect();
        assert!(rows.iter().all(|rows| (70..=190).contains(rows)), "{rows:?}");
    }
}
