//! Cost of a timeline: steps with the recorder on and off, one after the other, so that a busy machine slows both down.
//! Processor time does not count what other programs do on the core, so its ratio is the one to trust on a busy machine.
//!
//! ```sh
//! cargo run --release -p lockstep-trainer --example trace_cost -- small 40
//! ```

use std::time::Duration;

use lockstep_comm::single_rank;
use lockstep_data::{Options, Source};
use lockstep_kernels::Device;
use lockstep_plan::{Config, Environment, Plan};
use lockstep_trainer::Rank;

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_else(|| "tiny".into());
    let pairs: usize = args.next().and_then(|count| count.parse().ok()).unwrap_or(40);
    let model = match name.as_str() {
        "small" => "dim = 512\nlayers = 8\nheads = 8\nseq = 256",
        _ => "dim = 128\nlayers = 4\nheads = 4\nseq = 128",
    };
    let text =
        format!("[model]\nfamily = \"llama\"\n{model}\n[train]\nglobal_batch = 4\nmicro_batch = 2");
    let source =
        Source::open("builtin:grammar", &Options::default()).expect("the grammar is built in");
    let environment = Environment::one_host(1, 1).with_vocab(source.vocab());
    let plan = Plan::resolve(&Config::parse(&text, &[]), &environment).expect("a valid plan");
    let world = single_rank();
    let mut rank = Rank::new(&plan, &world, Device::cpu(1)).expect("one rank");
    let tracer = world.tracer().clone();
    rank.device.meter().trace(&tracer);
    let mut step = 0;
    let mut timed = |on: bool| {
        tracer.switch(on);
        rank.device.meter().switch(on);
        step += 1;
        let before = processor_time();
        let time = rank.step(&source, step).expect("a step").time;
        let used = processor_time() - before;
        (time, used, tracer.take().spans.len())
    };
    for _ in 0..3 {
        timed(false);
    }
    let (mut off, mut on, mut spans) = (Vec::new(), Vec::new(), 0);
    let (mut used_off, mut used_on) = (Vec::new(), Vec::new());
    for pair in 0..pairs {
        // The order alternates, so that a drift cancels.
        for traced in [pair % 2 == 0, pair % 2 == 1] {
            let (time, used, count) = timed(traced);
            let (times, uses) =
                if traced { (&mut on, &mut used_on) } else { (&mut off, &mut used_off) };
            times.push(time);
            uses.push(used);
            spans = spans.max(count);
        }
    }
    let mut ratios: Vec<f64> = used_on
        .iter()
        .zip(&used_off)
        .map(|(on, off)| on.as_secs_f64() / off.as_secs_f64())
        .collect();
    ratios.sort_by(f64::total_cmp);
    // The fastest steps are those that nothing else disturbed.
    let least = |times: &[Duration]| times.iter().min().map_or(0.0, Duration::as_secs_f64);
    let median = |times: &mut Vec<Duration>| {
        times.sort();
        times[times.len() / 2].as_secs_f64()
    };
    let (fast_off, fast_on) = (least(&off), least(&on));
    let (typical_off, typical_on) = (median(&mut off), median(&mut on));
    println!("{name}: {pairs} pairs of steps, {spans} spans per traced step");
    println!(
        "fastest: {:.3} ms off, {:.3} ms on: {:+.2}%",
        1e3 * fast_off,
        1e3 * fast_on,
        100.0 * (fast_on / fast_off - 1.0)
    );
    // The median of n values is between those at n/2 ± √n with a probability of 95%.
    let at = |shift: f64| {
        let place = ratios.len() as f64 / 2.0 + shift * (ratios.len() as f64).sqrt();
        100.0 * (ratios[(place.max(0.0) as usize).min(ratios.len() - 1)] - 1.0)
    };
    println!(
        "processor time, median of pairs: {:+.2}% (95%: {:+.2}% to {:+.2}%)",
        at(0.0),
        at(-1.0),
        at(1.0)
    );
    println!(
        "median:  {:.3} ms off, {:.3} ms on: {:+.2}%",
        1e3 * typical_off,
        1e3 * typical_on,
        100.0 * (typical_on / typical_off - 1.0)
    );
}

/// Processor time of this thread, which computes alone.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(result, 0, "Linux has a clock for the processor time of a thread");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
