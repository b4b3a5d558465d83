//! Time of the operations of a training step on a device, with the memory bandwidth or the rate that they reach:
//! `LOCKSTEP_DEVICE=cuda cargo run --release -p lockstep-kernels --example device_speed [tokens] [only]`.

use std::time::Instant;

use lockstep_kernels::{
    AdamW, AttentionOutput, AttentionShape, CrossEntropy, Device, Dtype, Fp8Cast, Fp8Copies,
    Fp8Format, Fp8Source, LogitGradient, Matmul, NormGradients, NormParams, OptimizerState,
    RandomKey, Tag, Tensor, VocabShard,
};

const KEY: RandomKey = RandomKey { seed: 1, stream: 1 };
const VOCAB: usize = 50304;
/// Width of the model and of its heads.
const MODELS: [(usize, usize); 4] = [(768, 64), (1024, 64), (1600, 64), (2048, 64)];

fn main() {
    let mut words = std::env::args().skip(1);
    let tokens = words.next().map_or(1024, |word| word.parse().expect("tokens must be a number"));
    let bench = Bench { device: Device::from_env(1), only: words.next() };
    for (dim, head_dim) in MODELS {
        println!("{tokens} tokens, width {dim}");
        bench.norms(tokens, dim);
        bench.sums(tokens, dim);
        bench.products(tokens, dim);
        bench.fp8(tokens, dim);
        bench.attention(tokens, dim, head_dim);
    }
    bench.loss(tokens);
    bench.embedding(tokens, 768);
    bench.optimizer(10_000_000);
}

struct Bench {
    device: Device,
    only: Option<String>,
}

/// Work of an operation, by which its speed is counted.
enum Work {
    Bytes(usize),
    Flops(usize),
}

impl Bench {
    /// Times an operation: the median of some runs of several calls.
    fn time(&self, name: &str, work: Work, mut call: impl FnMut(&Device)) {
        if self.only.as_ref().is_some_and(|only| !name.contains(only.as_str())) {
            return;
        }
        let device = &self.device;
        let mut run = |calls: usize| {
            device.synchronize();
            let (start, before) = (Instant::now(), device.record());
            (0..calls).for_each(|_| call(device));
            let after = device.record();
            let seconds = after.elapsed_since(&before).as_secs_f64();
            // Without a GPU, events have the resolution of the clock.
            seconds.max(start.elapsed().as_secs_f64() * 1e-3) / calls as f64
        };
        run(2);
        let calls = (2e-3 / run(2)).clamp(1.0, 50.0) as usize;
        let mut seconds: Vec<f64> = (0..9).map(|_| run(calls)).collect();
        seconds.sort_by(f64::total_cmp);
        let median = seconds[seconds.len() / 2];
        let speed = match work {
            Work::Bytes(bytes) => format!("{:8.1} GB/s", bytes as f64 / median * 1e-9),
            Work::Flops(flops) => format!("{:8.1} TFLOP/s", flops as f64 / median * 1e-12),
        };
        println!("  {name:<32} {:>9.1} µs {speed}", median * 1e6);
    }

    fn normal(&self, rows: usize, cols: usize, dtype: Dtype) -> Tensor {
        let mut tensor = self.device.empty(rows, cols, dtype, Tag::Activations);
        self.device.normal(tensor.view_mut(), KEY, 0, 1.0);
        tensor
    }

    fn bf16(&self, rows: usize, cols: usize) -> Tensor {
        self.normal(rows, cols, Dtype::Bf16)
    }

    fn f32(&self, rows: usize, cols: usize) -> Tensor {
        self.normal(rows, cols, Dtype::F32)
    }

    fn norms(&self, rows: usize, dim: usize) {
        let bytes = rows * dim * 2;
        let (mut x, dy, mut out) =
            (self.bf16(rows, dim), self.bf16(rows, dim), self.bf16(rows, dim));
        let (gain, bias) = (self.bf16(1, dim), self.bf16(1, dim));
        let mut stats = self.f32(rows, 2);
        let mut parameters = [self.f32(1, dim), self.f32(1, dim), self.f32(1, dim)];
        let params = NormParams::Layer { gain: gain.view(), bias: bias.view() };
        self.time("norm", Work::Bytes(2 * bytes), |device| {
            device.norm(params, x.view(), 1e-5, out.view_mut(), stats.view_mut());
        });
        self.time("add and norm", Work::Bytes(4 * bytes), |device| {
            let to = [x.view_mut(), out.view_mut(), stats.view_mut()];
            device.add_norm(params, to, dy.view(), 1e-5);
        });
        self.time("norm recompute", Work::Bytes(2 * bytes), |device| {
            device.norm_recompute(params, x.view(), stats.view(), out.view_mut());
        });
        let inputs = [x.view(), gain.view(), stats.view()];
        self.time("norm backward", Work::Bytes(4 * bytes), |device| {
            let [gain, bias, _] = &mut parameters;
            let (gain, bias) = (gain.view_mut(), Some(bias.view_mut()));
            let gradients = NormGradients { gain, bias, accumulate: false };
            device.norm_backward(inputs, dy.view(), out.view_mut(), gradients);
        });
        self.time("norm backward and sums", Work::Bytes(4 * bytes), |device| {
            let [gain, bias, sums] = &mut parameters;
            let (gain, bias) = (gain.view_mut(), Some(bias.view_mut()));
            let gradients = NormGradients { gain, bias, accumulate: false };
            let (dx, sums) = (out.view_mut(), sums.view_mut());
            device.norm_backward_and_sum(inputs, dy.view(), dx, gradients, sums);
        });
    }

    fn sums(&self, rows: usize, dim: usize) {
        for cols in [dim, 3 * dim, 4 * dim] {
            let (x, mut sums) = (self.bf16(rows, cols), self.f32(1, cols));
            self.time(&format!("column sums {cols}"), Work::Bytes(rows * cols * 2), |device| {
                device.column_sums(x.view(), sums.view_mut(), false);
            });
        }
    }

    fn products(&self, rows: usize, dim: usize) {
        for (inputs, outputs) in [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)] {
            let (x, mut y) = (self.bf16(rows, inputs), self.bf16(rows, outputs));
            let (w, mut dw) = (self.bf16(outputs, inputs), self.f32(outputs, inputs));
            let (bias, mut dx) = (self.bf16(1, outputs), self.bf16(rows, inputs));
            let flops = || Work::Flops(2 * rows * inputs * outputs);
            let name = |kind: &str| format!("{kind} {inputs} to {outputs}");
            self.time(&name("linear"), flops(), |device| {
                let plain = Matmul::linear(x.view(), w.view(), y.view_mut());
                device.matmul(Matmul { bias: Some(bias.view()), ..plain });
            });
            if outputs > 3 * dim {
                let mut before = self.bf16(rows, outputs);
                self.time(&name("linear and GELU"), flops(), |device| {
                    let plain = Matmul::linear(x.view(), w.view(), y.view_mut());
                    let gelu = Some(before.view_mut());
                    device.matmul(Matmul { bias: Some(bias.view()), gelu, ..plain });
                });
            }
            self.time(&name("input gradient"), flops(), |device| {
                device.matmul(Matmul::linear_dx(y.view(), w.view(), dx.view_mut()));
            });
            if inputs > dim {
                self.time(&name("input gradient and GELU"), flops(), |device| {
                    let plain = Matmul::linear_dx(y.view(), w.view(), dx.view_mut());
                    device.matmul(Matmul { gelu_backward: Some(x.view()), ..plain });
                });
            }
            self.time(&name("weight gradient"), flops(), |device| {
                device.matmul(Matmul::linear_dw(y.view(), x.view(), dw.view_mut()));
            });
        }
    }

    /// Casts, and the products of `products`.
    fn fp8(&self, rows: usize, dim: usize) {
        if !self.device.has_fp8() {
            return;
        }
        let cast = |device: &Device, from: Fp8Source<'_>, format| {
            let (copies, tag) = (Fp8Copies::Both, Tag::Buffers);
            device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums: None, history: None })
        };
        for (inputs, outputs) in [(dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)] {
            let (x, mut y) = (self.bf16(rows, inputs), self.bf16(rows, outputs));
            let (w, mut dw) = (self.bf16(outputs, inputs), self.f32(outputs, inputs));
            let (bias, mut dx) = (self.bf16(1, outputs), self.bf16(rows, inputs));
            let flops = || Work::Flops(2 * rows * inputs * outputs);
            let name = |kind: &str| format!("fp8 {kind} {inputs} to {outputs}");
            let whole = |x: &Tensor, format| cast(&self.device, Fp8Source::Whole(x.view()), format);
            let [x8, w8] = [&x, &w].map(|x| whole(x, Fp8Format::E4m3));
            let y8 = whole(&y, Fp8Format::E5m2);
            for (what, from, cols) in [("x", &x, inputs), ("w", &w, outputs * inputs / rows)] {
                self.time(
                    &name(&format!("cast of {what}")),
                    Work::Bytes(6 * rows * cols),
                    |device| {
                        cast(device, Fp8Source::Whole(from.view()), Fp8Format::E4m3);
                    },
                );
            }
            self.time(&name("cast of dy"), Work::Bytes(6 * rows * outputs), |device| {
                cast(device, Fp8Source::Whole(y.view()), Fp8Format::E5m2);
            });
            let mut sums = self.f32(1, outputs);
            self.time(&name("cast and sums of dy"), Work::Bytes(6 * rows * outputs), |device| {
                let (format, copies, tag) = (Fp8Format::E5m2, Fp8Copies::Both, Tag::Buffers);
                let column_sums = Some((sums.view_mut(), false));
                let from = Fp8Source::Whole(y.view());
                device.fp8_cast(Fp8Cast { from, format, copies, tag, column_sums, history: None });
            });
            if outputs > 3 * dim {
                self.time(&name("cast and GELU"), Work::Bytes(6 * rows * outputs), |device| {
                    cast(device, Fp8Source::Gelu(y.view()), Fp8Format::E4m3);
                });
            }
            for fast in [true, false] {
                let kind = if fast { ", fast" } else { "" };
                let name = |what: &str| name(&format!("{what}{kind}"));
                let set = |work: Matmul<'_>| {
                    let mut work = work;
                    work.fp8.as_mut().expect("an fp8 product").fast = fast;
                    self.device.matmul(work);
                };
                self.time(&name("linear"), flops(), |_| {
                    let plain = Matmul::fp8_linear(&x8, &w8, y.view_mut());
                    set(Matmul { bias: Some(bias.view()), ..plain });
                });
                self.time(&name("input gradient"), flops(), |_| {
                    set(Matmul::fp8_linear_dx(&y8, &w8, dx.view_mut()));
                });
                if inputs > dim {
                    self.time(&name("input gradient and GELU"), flops(), |_| {
                        let plain = Matmul::fp8_linear_dx(&y8, &w8, dx.view_mut());
                        set(Matmul { gelu_backward: Some(x.view()), ..plain });
                    });
                }
                self.time(&name("weight gradient"), flops(), |_| {
                    set(Matmul::fp8_linear_dw(&y8, &x8, dw.view_mut()));
                });
            }
        }
    }

    fn attention(&self, tokens: usize, dim: usize, head_dim: usize) {
        let len = tokens.min(1024);
        let (batch, heads) = (tokens / len, dim / head_dim);
        let shape = AttentionShape::square(batch, len, heads, heads, head_dim);
        let qkv = self.bf16(tokens, 3 * dim);
        let (mut out, dout) = (self.bf16(tokens, dim), self.bf16(tokens, dim));
        let (mut lse, mut dqkv) = (self.f32(batch * heads, len), self.bf16(tokens, 3 * dim));
        let pairs = batch * heads * len * (len + 1) / 2;
        self.time("attention", Work::Flops(4 * pairs * head_dim), |device| {
            device.attention(&shape, qkv.view(), out.view_mut(), lse.view_mut());
        });
        self.time("attention backward", Work::Flops(10 * pairs * head_dim), |device| {
            let from = AttentionOutput { out: out.view(), lse: lse.view(), dout: dout.view() };
            device.attention_backward(&shape, qkv.view(), from, dqkv.view_mut());
        });
    }

    fn loss(&self, rows: usize) {
        let logits = match self.device.device_type() {
            lockstep_kernels::DeviceType::Cuda => Dtype::Bf16,
            _ => Dtype::F32,
        };
        let mut logits = self.normal(rows, VOCAB, logits);
        let targets: Vec<u32> = (0..rows as u64).map(|i| KEY.word(i) % VOCAB as u32).collect();
        let mut ids = self.device.empty(1, rows, Dtype::U32, Tag::Buffers);
        self.device.write(ids.view_mut(), &targets);
        let mut losses = self.f32(1, rows);
        let bytes = 2 * logits.len() * logits.dtype().bytes();
        self.time("cross-entropy and gradient", Work::Bytes(bytes), |device| {
            device.cross_entropy(CrossEntropy {
                logits: logits.view_mut(),
                targets: ids.view(),
                losses: losses.view_mut(),
                gradient: LogitGradient::InPlace(1e-4),
            });
        });
    }

    fn embedding(&self, rows: usize, dim: usize) {
        let table = self.bf16(VOCAB, dim);
        let mut dtable = self.f32(VOCAB, dim);
        let (mut out, dy) = (self.bf16(rows, dim), self.bf16(rows, dim));
        for (name, most) in [("embedding of bytes", 256), ("embedding", VOCAB as u32)] {
            let targets: Vec<u32> = (0..rows as u64).map(|i| KEY.word(i) % most).collect();
            let mut ids = self.device.empty(1, rows, Dtype::U32, Tag::Buffers);
            self.device.write(ids.view_mut(), &targets);
            let (ids, shard) = (ids.view(), VocabShard::all(VOCAB));
            self.time(name, Work::Bytes(4 * rows * dim), |device| {
                device.embed(ids, table.view(), shard, None, out.view_mut());
            });
            let bytes = rows * dim * 2 + VOCAB * dim * 4;
            self.time(&format!("{name}, backward"), Work::Bytes(bytes), |device| {
                device.embed_backward(ids, dy.view(), shard, dtable.view_mut(), false);
            });
        }
    }

    fn optimizer(&self, n: usize) {
        let (mut p, mut m, mut v) = (self.f32(1, n), self.f32(1, n), self.f32(1, n));
        let (g, mut copy) = (self.f32(1, n), self.bf16(1, n));
        self.time("AdamW", Work::Bytes(30 * n), |device| {
            let state = OptimizerState {
                parameters: p.view_mut(),
                bf16_copy: Some(copy.view_mut()),
                first_moment: m.view_mut(),
                second_moment: v.view_mut(),
            };
            device.adamw(&AdamW::default(), state, g.view());
        });
        self.time("sum of squares", Work::Bytes(4 * n), |device| {
            let _ = device.sum_of_squares([g.view()]);
        });
    }
}
