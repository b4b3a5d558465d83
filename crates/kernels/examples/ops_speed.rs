//! Memory bandwidth of the simple operations in GB/s, compared with a plain copy of the same size.
//!
//!     cargo run --release -p lockstep-kernels --example ops_speed [threads] [portable|avx2|avx512] [only]

use half::bf16;
use lockstep_kernels::cpu::cross_entropy::{self, Loss, Targets};
use lockstep_kernels::cpu::embedding::{TableGradient, Tokens};
use lockstep_kernels::cpu::norm::{self, Backward, Gradients, Params};
use lockstep_kernels::cpu::top_k::{PAIR_BYTES, take_top_k};
use lockstep_kernels::cpu::{
    Cpu, Level, adamw, dropout, elementwise, embedding, gelu, quantize, random, reduce, swiglu,
};
use lockstep_kernels::{AdamW, Code, DropoutMask, Float, RandomKey, VocabShard};
use std::time::Instant;

const KEY: RandomKey = RandomKey { seed: 1, stream: 1 };

fn main() {
    let mut words = std::env::args().skip(1);
    let threads = words.next().map_or(1, |word| word.parse().expect("threads must be a number"));
    let level = match words.next().as_deref() {
        Some("portable") => Level::Portable,
        Some("avx2") => Level::Avx2,
        Some("avx512") => Level::Avx512,
        _ => Level::of_this_machine(),
    };
    let cpu = Cpu::at(level, threads);
    println!("{threads} threads, {level:?}");
    for (rows, dim) in [(2048, 128), (1024, 512), (512, 768)] {
        shape::<f32>(&cpu, rows, dim);
        shape::<bf16>(&cpu, rows, dim);
    }
    loss(&cpu, 1024, 8192);
    large::<f32>(&cpu, 30_000_000);
    large::<bf16>(&cpu, 30_000_000);
    packed(&cpu, 2 << 20);
}

/// Times `work`, which moves `bytes`: the best of many short runs, because other processes may use the machine.
fn time(what: &str, bytes: usize, mut work: impl FnMut()) {
    if std::env::args().nth(3).is_some_and(|only| !what.contains(&only)) {
        return;
    }
    work();
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while begin.elapsed().as_secs_f64() < 0.3 {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    println!("{what:<44} {:>10.1} µs {:>8.1} GB/s", best * 1e6, bytes as f64 / best / 1e9);
}

fn normal<E: Float>(cpu: &Cpu, n: usize) -> Vec<E> {
    let mut out = vec![E::default(); n];
    random::normal(cpu, KEY, 0, &mut out, 1.0);
    out
}

fn shape<E: Float>(cpu: &Cpu, rows: usize, dim: usize) {
    let (n, size) = (rows * dim, size_of::<E>());
    let name = |op: &str| format!("{op} ({rows}, {dim}) {}", E::DTYPE);
    let (x, dy, gain): (Vec<E>, Vec<E>, Vec<E>) =
        (normal(cpu, n), normal(cpu, n), normal(cpu, dim));
    let (mut out, mut stats) = (vec![E::default(); n], vec![0.0; rows * 2]);
    let (mut dgain, mut dbias) = (vec![0.0; dim], vec![0.0; dim]);

    time(&name("copy"), 2 * n * size, || elementwise::copy(cpu, &x, &mut out));
    let layer = Params { gain: &gain, bias: Some(&gain), eps: 1e-5 };
    time(&name("layer forward"), 2 * n * size, || {
        norm::forward(cpu, layer, &x, &mut out, Some(&mut stats));
    });
    let from = Backward { x: &x, gain: &gain, stats: &stats, dy: &dy };
    time(&name("layer backward"), 3 * n * size, || {
        let (gain, bias) = (&mut dgain[..], Some(&mut dbias[..]));
        let gradients = Gradients { gain, bias, accumulate: false };
        norm::backward(cpu, &from, &mut out, false, gradients);
    });
    let mut rstd = vec![0.0; rows];
    time(&name("rms forward"), 2 * n * size, || {
        norm::forward(cpu, Params { bias: None, ..layer }, &x, &mut out, Some(&mut rstd));
    });
    let from = Backward { stats: &rstd, ..from };
    time(&name("rms backward"), 3 * n * size, || {
        let gradients = Gradients { gain: &mut dgain, bias: None, accumulate: false };
        norm::backward(cpu, &from, &mut out, false, gradients);
    });
    time(&name("gelu forward"), 2 * n * size, || gelu::forward(cpu, &x, &mut out));
    time(&name("gelu backward"), 3 * n * size, || gelu::backward_in_place(cpu, &x, &mut out));
    let half = n / 2;
    time(&name("swiglu forward"), (n + half) * size, || {
        swiglu::forward(cpu, &x, dim / 2, &mut out[..half])
    });
    time(&name("swiglu backward"), (2 * n + half) * size, || {
        swiglu::backward(cpu, &x, dim / 2, &dy[..half], &mut out);
    });
    time(&name("add"), 3 * n * size, || elementwise::add(cpu, &mut out, &x));
    time(&name("column sums"), n * size, || reduce::column_sums(cpu, &x, &mut dbias, true));
    time(&name("dropout"), 2 * n * size, || {
        dropout::apply(cpu, &DropoutMask { key: KEY, p: 0.1, first: 0 }, &mut out)
    });
    let ids: Vec<u32> = (0..rows as u64).map(|i| KEY.word(i) % 8192).collect();
    let table: Vec<E> = normal(cpu, 8192 * dim);
    let tokens = Tokens { ids: &ids, shard: VocabShard::all(8192) };
    time(&name("embedding forward"), 2 * n * size, || {
        embedding::forward(cpu, tokens, &table, None, &mut out);
    });
    let mut dtable = vec![0.0; 8192 * dim];
    time(&name("embedding backward"), n * (size + 8), || {
        embedding::backward(
            cpu,
            tokens,
            &dy,
            TableGradient { table: &mut dtable, accumulate: true },
        );
    });
}

fn loss(cpu: &Cpu, rows: usize, vocab: usize) {
    let logits: Vec<f32> = normal(cpu, rows * vocab);
    let targets: Vec<u32> = (0..rows as u64).map(|i| KEY.word(i) % vocab as u32).collect();
    let how = Loss { scale: 1.0, z_loss: 0.0 };
    let (mut losses, mut d, mut narrow) =
        (vec![0.0; rows], logits.clone(), vec![bf16::ZERO; rows * vocab]);
    let bytes = rows * vocab * 4;
    let name = |op: &str| format!("{op} ({rows}, {vocab})");
    time(&name("loss in place, f32"), 2 * bytes, || {
        cross_entropy::in_place(cpu, &mut d, &targets, how, &mut losses);
    });
    time(&name("loss, f32 to bf16"), bytes + bytes / 2, || {
        let targets = Targets { ids: &targets, first: 0, how };
        cross_entropy::into(cpu, &logits, targets, &mut losses, &mut narrow);
    });
    time(&name("losses without gradient"), bytes, || {
        cross_entropy::losses(cpu, &logits, &targets, how, &mut losses)
    });
}

fn large<G: Float>(cpu: &Cpu, n: usize) {
    let g: Vec<G> = normal(cpu, n);
    let (mut p, mut m, mut v) = (vec![0f32; n], vec![0f32; n], vec![0f32; n]);
    let name = |op: &str| format!("{op} {} M {}", n / 1_000_000, G::DTYPE);
    let numbers = AdamW::default();
    time(&name("copy f32"), n * 8, || elementwise::copy(cpu, &p, &mut m));
    time(&name("add to f32"), n * (8 + size_of::<G>()), || elementwise::add(cpu, &mut p, &g));
    time(&name("adamw"), n * (24 + size_of::<G>()), || {
        let state = adamw::State { p: &mut p, m: &mut m, v: &mut v, bf16_copy: None };
        adamw::step(cpu, &numbers, state, &g);
    });
    let mut copy = vec![bf16::ZERO; n];
    time(&name("adamw, bf16 copy"), n * (26 + size_of::<G>()), || {
        let bf16_copy = Some(&mut copy[..]);
        adamw::step(cpu, &numbers, adamw::State { p: &mut p, m: &mut m, v: &mut v, bf16_copy }, &g);
    });
    time(&name("sum of squares"), n * size_of::<G>(), || {
        std::hint::black_box(reduce::sum_of_squares(cpu, &g));
    });
    time(&name("non-finite"), n * size_of::<G>(), || {
        std::hint::black_box(reduce::count_non_finite(cpu, &g));
    });
    let mut random = vec![G::default(); n];
    time(&name("normal"), n * size_of::<G>(), || random::normal(cpu, KEY, 0, &mut random, 0.02));
}

/// Gradient compression.
fn packed(cpu: &Cpu, n: usize) {
    let (x, mut error) = (normal::<f32>(cpu, n), vec![0f32; n]);
    for code in [Code::Bf16, Code::F16, Code::Int8] {
        let mut packed = vec![0; code.bytes(n)];
        let bytes = packed.len();
        time(&format!("pack into {code:?}, {n}"), 12 * n + bytes, || {
            quantize::quantize(cpu, code, &x, &mut error, &mut packed)
        });
        time(&format!("add unpacked {code:?}, {n}"), 8 * n + bytes, || {
            quantize::dequantize_add(cpu, code, &packed, &mut error)
        });
    }
    let mut pairs = vec![0; n / 100 * PAIR_BYTES];
    // Includes the copy that restores the input.
    time(&format!("take the largest of {n}, one in 100"), 24 * n, || {
        elementwise::copy(cpu, &x, &mut error);
        take_top_k(cpu, &mut error, &mut pairs);
    });
}
