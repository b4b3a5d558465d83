//! Benchmarks attention for a few shapes: `cargo run --release -p lockstep-kernels --example attention_speed
//! [seconds per shape] [threads]`. FLOPs are counted as usual: 4 head_dim per query-key pair forward, 10 backward,
//! without recomputation.

use half::bf16;
use lockstep_kernels::AttentionShape;
use lockstep_kernels::Float;
use lockstep_kernels::cpu::Cpu;
use lockstep_kernels::cpu::attention::{self, DeltaFrom, Gradients, Rows, RowsMut, Saved};
use std::time::Instant;

/// name, batch, heads, kv_heads, head_dim, tokens
const SHAPES: [(&str, [usize; 5]); 4] = [
    ("tiny", [16, 4, 4, 32, 128]),
    ("small", [4, 8, 8, 64, 256]),
    ("gpt2", [1, 12, 12, 64, 512]),
    ("llama", [1, 8, 2, 128, 1024]),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds =
        arguments.next().map_or(1.0, |s| s.parse().expect("seconds per shape must be a number"));
    let threads = arguments.next().map_or(1, |s| s.parse().expect("threads must be a number"));
    let cpu = Cpu::new(threads);
    println!("{:?}, {threads} threads; best and median of calls", cpu.level);
    for (name, shape) in SHAPES {
        measure::<f32>(&cpu, name, shape, seconds);
    }
    for (name, shape) in SHAPES {
        measure::<bf16>(&cpu, name, shape, seconds);
    }
}

fn measure<E: Float>(
    cpu: &Cpu,
    name: &str,
    [batch, heads, kv_heads, head_dim, len]: [usize; 5],
    seconds: f64,
) {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape {
        batch,
        heads,
        kv_heads,
        head_dim,
        q_len: len,
        k_len: len,
        q_start: 0,
        k_start: 0,
        scale,
    };
    let (width, kv_width) = (heads * head_dim, kv_heads * head_dim);
    let stride = width + 2 * kv_width;
    let number = |i: usize| E::round_from(((i * 7919) % 4001) as f32 / 2000.0 - 1.0);
    let qkv: Vec<E> = (0..batch * len * stride).map(number).collect();
    let dout: Vec<E> = (0..batch * len * width).map(number).collect();
    let mut dqkv = qkv.clone();
    let mut out = dout.clone();
    let mut lse = vec![0.0; batch * heads * len];
    let [q, k, v] = [0, width, width + kv_width].map(|offset| Rows { data: &qkv, offset, stride });
    let (mut forward, mut backward) = (vec![], vec![]);
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        attention::forward(cpu, &shape, [q, k, v], &mut out, &mut lse);
        forward.push(start.elapsed().as_secs_f64());
        let parts = [0..width, width..width + kv_width, width + kv_width..stride];
        let [dq, dk, dv] = RowsMut::columns(&mut dqkv, stride, parts);
        let start = Instant::now();
        let saved = Saved { dout: &dout, lse: &lse, delta: DeltaFrom::Output(&out) };
        let gradients = Gradients { dq, dk, dv, accumulate: false };
        attention::backward(cpu, &shape, [q, k, v], saved, gradients);
        backward.push(start.elapsed().as_secs_f64());
    }
    let pairs = (batch * heads * len * (len + 1) / 2 * head_dim) as f64;
    let line = |what: &str, times: &mut Vec<f64>, flops: f64| {
        times.sort_by(f64::total_cmp);
        let (best, middle) = (times[0], times[times.len() / 2]);
        print!(
            "  {what} {:8.3} / {:8.3} ms, {:6.1} GFLOP/s",
            best * 1e3,
            middle * 1e3,
            flops / best / 1e9
        );
        best
    };
    print!("{name:6} {:5}", E::DTYPE);
    let best = line("forward", &mut forward, 4.0 * pairs);
    let sum = best + line("backward", &mut backward, 10.0 * pairs);
    println!("  both {:8.3} ms, {:6.1} GFLOP/s", sum * 1e3, 14.0 * pairs / sum / 1e9);
}
