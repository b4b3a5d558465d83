//! Speedup of context parallelism: `cargo run --release -p lockstep-parallel --example context_speed [ranks] [tokens]
//! [calls]`. Ranks are threads of this process with one thread each; times are forward and backward on the slowest
//! rank, best of all calls.

use half::bf16;
use lockstep_comm::{Op, World, on_threads};
use lockstep_kernels::{Device, Float, RandomKey, Tag};
use lockstep_parallel::context::{AttentionBackward, Context, Heads};
use lockstep_plan::context::{ContextKind, check, degrees};
use std::time::Instant;

const HEADS: Heads = Heads { batch: 1, heads: 8, kv_heads: 4, head_dim: 64, scale: 0.125 };

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |name: &str, default: usize| {
        arguments.next().map_or(default, |typed| typed.parse().expect(name))
    };
    let (ranks, seq, calls) = (number("ranks", 2), number("tokens", 4096), number("calls", 5));
    println!(
        "{seq} tokens, {} heads of {} ({} key heads)",
        HEADS.heads, HEADS.head_dim, HEADS.kv_heads
    );
    kinds::<f32>(ranks, seq, calls);
    kinds::<bf16>(ranks, seq, calls);
}

fn kinds<E: Float>(ranks: usize, seq: usize, calls: usize) {
    let alone = measure::<E>(ContextKind::Ring, 1, seq, calls);
    println!("{:5}   one rank {:9.2} ms", E::DTYPE, alone * 1e3);
    for kind in [ContextKind::Ring, ContextKind::Ulysses, ContextKind::Both] {
        match check(kind, ranks, seq, HEADS.heads, HEADS.kv_heads) {
            Err(why) => println!("{:5} {:>10}: {why}", E::DTYPE, format!("{kind:?}")),
            Ok(()) => {
                let time = measure::<E>(kind, ranks, seq, calls);
                let (name, gain) = (format!("{kind:?}"), alone / time);
                println!(
                    "{:5} {name:>10} {:9.2} ms on {ranks} ranks, {gain:.2}×",
                    E::DTYPE,
                    time * 1e3
                );
            }
        }
    }
}

/// Seconds of the best call.
fn measure<E: Float>(kind: ContextKind, ranks: usize, seq: usize, calls: usize) -> f64 {
    let degrees = degrees(kind, ranks, HEADS.heads, HEADS.kv_heads);
    let times = on_threads(ranks, |world| {
        let context = Context::new(&world, kind, seq, degrees).expect("the degrees were checked");
        let device = Device::cpu(1);
        let times = (0..=calls).map(|call| one_call::<E>(&world, &context, &device, call));
        // The first call allocates the buffers.
        times.skip(1).fold(f64::INFINITY, f64::min)
    });
    times[0]
}

fn one_call<E: Float>(world: &World, context: &Context, device: &Device, call: usize) -> f64 {
    let tokens = context.runs().iter().map(|run| run.len).sum();
    let make = |cols: usize, stream: u64| {
        let mut tensor = device.empty(tokens, cols, E::DTYPE, Tag::Activations);
        let key = RandomKey { seed: call as u64, stream };
        device.normal(tensor.view_mut(), key, 0, 1.0);
        tensor
    };
    let (width, columns) = (HEADS.heads * 64, (HEADS.heads + 2 * HEADS.kv_heads) * 64);
    let (qkv, dout) = (make(columns, 1), make(width, 2));
    let (mut out, mut dqkv) = (make(width, 3), make(columns, 4));
    world.barrier().expect("no rank fails");
    let start = Instant::now();
    let saved = context.forward(device, &HEADS, qkv, out.view_mut()).expect("no rank fails");
    let (out, to) = (out.view(), dqkv.view_mut());
    let backward = AttentionBackward { saved, out, dout: dout.view(), dqkv: to };
    context.backward(device, &HEADS, backward).expect("no rank fails");
    let mut slowest = [start.elapsed().as_secs_f64()];
    world.all_reduce(&mut slowest, Op::Max).expect("no rank fails");
    slowest[0]
}
