//! Isolated operations of a GPU: matmuls, attention, copies and launches. Operands are random, because a GPU is faster on
//! zeros, which take less power.

use std::time::Instant;

use lockstep_kernels::{
    AttentionOutput, AttentionShape, Device, Dtype, Matmul, RandomKey, Tag, Tensor,
};
use lockstep_sim::{GpuMeasurement, MeasuredAttention, MeasuredMatmul, MeasuredStep};

/// Linear layers (tokens, inputs, outputs), from small to large, with short and long inner dimensions.
const LAYERS: [[usize; 3]; 14] = [
    [1024, 256, 768],
    [2048, 384, 1536],
    [8192, 640, 640],
    [16384, 640, 2560],
    [16384, 2560, 640],
    [8192, 896, 2688],
    [16384, 1280, 1280],
    [16384, 1280, 5120],
    [16384, 5120, 1280],
    [8192, 1792, 7168],
    [16384, 2560, 2560],
    [8192, 3072, 12288],
    [4096, 1152, 32768],
    [4096, 2304, 65536],
];

/// Head sizes and lengths of attention in bf16, and in f32.
const HEADS: [(Dtype, &[usize], &[usize]); 2] = [
    (Dtype::Bf16, &[64, 96, 128], &[512, 1024, 2048, 4096, 8192]),
    (Dtype::F32, &[64], &[512, 1024, 2048]),
];

/// Tokens and columns of the measured attention.
const ATTENTION: [usize; 2] = [16384, 1536];

/// Bytes of a copy, which exceed every cache.
const COPY_BYTES: usize = 1 << 30;

/// Measurement time of an operation in seconds, after a warm-up of a third of it.
const SECONDS: f64 = 0.03;

/// Measures all operations. The steps are of two small models.
pub fn measure(gpu: &Device, [tiny, tiniest]: [MeasuredStep; 2]) -> anyhow::Result<GpuMeasurement> {
    let [kernel, launch] = launches(gpu);
    let both = [Dtype::F32, Dtype::Bf16];
    gpu.set_tf32(false);
    let matmuls = both.into_iter().flat_map(|compute| matmuls(gpu, compute)).collect();
    gpu.set_tf32(true);
    let tf32 = self::matmuls(gpu, Dtype::F32);
    gpu.set_tf32(false);
    Ok(GpuMeasurement {
        matmuls,
        tf32,
        attention: HEADS.iter().flat_map(|heads| attention(gpu, heads)).collect(),
        copy_rate: copy_rate(gpu),
        host_rates: host_rates(gpu),
        kernel,
        launch,
        steps: Vec::new(),
        tiny,
        tiniest,
        more_tokens: Vec::new(),
    })
}

/// The output of each layer, its input gradient, and its weight gradient.
fn matmuls(gpu: &Device, compute: Dtype) -> Vec<MeasuredMatmul> {
    let mut all = Vec::new();
    for [tokens, inputs, outputs] in LAYERS {
        let x = random(gpu, [tokens, inputs], compute);
        let weight = random(gpu, [outputs, inputs], compute);
        let dy = random(gpu, [tokens, outputs], compute);
        let mut add = |dims, sums, seconds| {
            all.push(MeasuredMatmul { dims, compute, sums, seconds });
        };
        let mut out = gpu.empty(tokens, outputs, compute, Tag::Buffers);
        let multiply = || gpu.matmul(Matmul::linear(x.view(), weight.view(), out.view_mut()));
        add([tokens, inputs, outputs], false, seconds(gpu, multiply));
        drop(out);
        let mut dx = gpu.empty(tokens, inputs, compute, Tag::Buffers);
        let multiply = || gpu.matmul(Matmul::linear_dx(dy.view(), weight.view(), dx.view_mut()));
        add([tokens, outputs, inputs], false, seconds(gpu, multiply));
        drop(dx);
        let mut dw = gpu.zeros(outputs, inputs, Dtype::F32, Tag::Buffers);
        let multiply = || {
            let dw = Matmul::linear_dw(dy.view(), x.view(), dw.view_mut());
            gpu.matmul(Matmul { accumulate: true, ..dw })
        };
        add([outputs, tokens, inputs], true, seconds(gpu, multiply));
    }
    all
}

fn attention(
    gpu: &Device,
    (compute, heads, lengths): &(Dtype, &[usize], &[usize]),
) -> Vec<MeasuredAttention> {
    let ([tokens, columns], compute) = (ATTENTION, *compute);
    let qkv = random(gpu, [tokens, 3 * columns], compute);
    let dout = random(gpu, [tokens, columns], compute);
    let mut dqkv = gpu.empty(tokens, 3 * columns, compute, Tag::Buffers);
    let mut out = gpu.empty(tokens, columns, compute, Tag::Buffers);
    let mut all = Vec::new();
    for (&head_dim, &seq) in
        heads.iter().flat_map(|head| lengths.iter().map(move |seq| (head, seq)))
    {
        let (heads, batch) = (columns / head_dim, tokens / seq);
        let shape = AttentionShape::square(batch, seq, heads, heads, head_dim);
        let mut lse = gpu.empty(batch * heads, seq, Dtype::F32, Tag::Buffers);
        let forward = seconds(gpu, || {
            gpu.attention(&shape, qkv.view(), out.view_mut(), lse.view_mut());
        });
        let output = AttentionOutput { out: out.view(), lse: lse.view(), dout: dout.view() };
        let [nondeterministic, backward] = [false, true].map(|deterministic| {
            gpu.set_deterministic_attention(deterministic);
            seconds(gpu, || gpu.attention_backward(&shape, qkv.view(), output, dqkv.view_mut()))
        });
        all.push(MeasuredAttention {
            compute,
            rows: batch * heads,
            head_dim,
            seq,
            seconds: [forward, backward],
            nondeterministic,
        });
    }
    all
}

/// Bytes per second, read plus written, of a copy in device memory.
fn copy_rate(gpu: &Device) -> f64 {
    let buffer = || gpu.zeros(1, COPY_BYTES / 4, Dtype::F32, Tag::Buffers);
    let (from, mut to) = (buffer(), buffer());
    2.0 * COPY_BYTES as f64 / seconds(gpu, || gpu.copy(from.view(), to.view_mut()))
}

/// Bytes per second from page-locked host memory to the device, and back.
fn host_rates(gpu: &Device) -> [f64; 2] {
    let elements = COPY_BYTES / 16;
    let mut host = gpu.empty_host(1, elements, Dtype::F32, Tag::Buffers);
    let mut device = gpu.zeros(1, elements, Dtype::F32, Tag::Buffers);
    let up = seconds(gpu, || gpu.copy(host.view(), device.view_mut()));
    let down = seconds(gpu, || gpu.copy(device.view(), host.view_mut()));
    [up, down].map(|seconds| (4 * elements) as f64 / seconds)
}

/// Seconds that a kernel takes at least, and seconds for the host to launch one.
fn launches(gpu: &Device) -> [f64; 2] {
    const COUNT: usize = 2000;
    let mut small = gpu.zeros(1, 32, Dtype::F32, Tag::Buffers);
    let kernel = seconds(gpu, || gpu.fill(small.view_mut(), 1.0));
    gpu.synchronize();
    let start = Instant::now();
    (0..COUNT).for_each(|_| gpu.fill(small.view_mut(), 1.0));
    let launch = start.elapsed().as_secs_f64() / COUNT as f64;
    gpu.synchronize();
    [kernel, launch]
}

fn random(gpu: &Device, [rows, cols]: [usize; 2], dtype: Dtype) -> Tensor {
    let mut tensor = gpu.empty(rows, cols, dtype, Tag::Buffers);
    gpu.normal(tensor.view_mut(), RandomKey { seed: 1, stream: (rows + cols) as u64 }, 0, 1.0);
    tensor
}

/// Seconds per call on the device.
fn seconds(gpu: &Device, mut call: impl FnMut()) -> f64 {
    // The first calls choose an algorithm.
    call();
    let mut run = |calls: usize| {
        let start = gpu.record();
        (0..calls).for_each(|_| call());
        gpu.record().elapsed_since(&start).as_secs_f64() / calls as f64
    };
    let once = run(2);
    let calls = |seconds: f64| ((seconds / once) as usize).clamp(2, 5000);
    run(calls(SECONDS / 3.0));
    run(calls(SECONDS))
}
