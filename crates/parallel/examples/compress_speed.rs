//! Time and sent bytes of an all-reduce of 8 MiB on two ranks, for every compression.
//!
//! `compress_speed [MiB] [threads]` starts two processes of itself, first over shared memory and then over TCP.

use lockstep_comm::{LocalLinks, Options, World, human_bytes};
use lockstep_kernels::{Device, ViewMut};
use lockstep_launch::{LaunchSpec, identity, launch};
use lockstep_parallel::compress::Compressor;
use lockstep_plan::Compression;
use std::time::{Duration, Instant};

/// As in the `lockstep` binary: large buffers are accessed in place.
#[global_allocator]
static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;

const LINKS: &str = "LOCKSTEP_EXAMPLE_LINKS";
const FORMS: [&str; 6] = ["none", "bf16", "f16", "int8", "topk:0.01", "topk:0.001"];

fn main() {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse().expect("[MiB] [threads]")).collect();
    let (mib, threads) =
        (numbers.first().copied().unwrap_or(8), numbers.get(1).copied().unwrap_or(1));
    match std::env::var(LINKS) {
        Ok(links) => rank(&links, mib << 18, threads),
        Err(_) => ["shm", "tcp"].into_iter().for_each(start),
    }
}

fn start(links: &str) {
    let program = std::env::current_exe().expect("this program has a path").into_os_string();
    let command = [program].into_iter().chain(std::env::args_os().skip(1));
    let logs = std::env::temp_dir().join(format!("compress-speed-{}", std::process::id()));
    let mut spec = LaunchSpec::local(2, command.collect(), logs.clone());
    spec.extra_env = vec![(LINKS.into(), links.into())];
    let outcome = launch(&spec).expect("the ranks start");
    let _ = std::fs::remove_dir_all(logs);
    assert_eq!(outcome.exit_code, 0, "{links}: {:?}", outcome.failure);
}

fn rank(links: &str, len: usize, threads: usize) {
    let local = if links == "tcp" { LocalLinks::Tcp } else { LocalLinks::SharedMemory };
    let identity = identity::from_process_env().expect("the launcher set it");
    let options = Options { local, ..Options::default() };
    let world = World::join(&identity, &options).expect("the world forms");
    let device = Device::cpu(threads);
    if world.rank() == 0 {
        println!("{links}: {} of f32, 2 ranks of {threads} thread(s)", human_bytes(len as u64 * 4));
        println!("  compression   median ms   fastest ms   sent by a rank");
    }
    for form in FORMS {
        let how: Compression = form.parse().expect("a compression");
        let (median, fastest, sent) = measure(&world, &device, how, len);
        if world.rank() == 0 {
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let sent = human_bytes(sent);
            println!("  {form:<11} {:>11.2} {:>12.2}   {sent:>14}", ms(median), ms(fastest));
        }
    }
}

/// (median, minimum, bytes that this rank sends) of thirty steps, after three warm-up steps.
fn measure(
    world: &World,
    device: &Device,
    how: Compression,
    len: usize,
) -> (Duration, Duration, u64) {
    let mut compressor = Compressor::new(device, how, len, world.size());
    let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 1e7 - 0.8;
    let gradient: Vec<f32> = (0..len).map(|i| number(i + world.rank()).powi(5)).collect();
    let mut buffer = gradient.clone();
    let mut times = Vec::new();
    let before = world.traffic().bytes;
    let steps = 33;
    for _ in 0..steps {
        buffer.copy_from_slice(&gradient);
        world.barrier().expect("no rank fails");
        let begin = Instant::now();
        compressor.all_reduce(world, ViewMut::of(&mut buffer)).expect("no rank fails");
        times.push(begin.elapsed());
    }
    let sent = (world.traffic().bytes - before) / steps;
    let mut times = times.split_off(3);
    times.sort();
    (times[times.len() / 2], times[0], sent)
}
