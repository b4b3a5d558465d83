//! The command line: one file per command, each a thin layer over the crates.

mod commands;
mod consistency;
mod machine;
mod panic_hook;
mod print;
mod run_file;
mod stop;
mod supervise;
mod world;

use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use commands::{
    bench, ckpt, completions, dash, data, doctor, export, generate, import, init, launch, plan,
    presets, trace, train, trees, verify,
};
use tracing_subscriber::filter::LevelFilter;

/// Allocates large buffers in memory that the other ranks of the host can map.
#[global_allocator]
static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;

/// Version and commit.
const VERSION: &str = env!("LOCKSTEP_VERSION");

/// Distributed training of GPT-2, Llama and mixture-of-experts models
#[derive(Parser)]
#[command(version = VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Init(init::Args),
    Presets(presets::Args),
    Train(train::Args),
    Plan(plan::Args),
    Verify(verify::Args),
    Trace(trace::Args),
    Doctor(doctor::Args),
    Dash(dash::Args),
    Generate(generate::Args),
    Launch(launch::Args),
    /// Measure collectives, matrix multiplications, training steps or this machine
    Bench(bench::Args),
    Import(import::Args),
    Export(export::Args),
    /// List, inspect, check and compare checkpoints
    Ckpt(ckpt::Args),
    /// Create and inspect token files
    Data(data::Args),
    /// Train and use gradient-boosted trees
    Trees(trees::Args),
    Completions(completions::Args),
}

fn main() -> ExitCode {
    // SAFETY: no other thread runs yet.
    unsafe { lockstep_cuda::use_all_queues() };
    panic_hook::install();
    let log = tracing_subscriber::fmt().with_max_level(log_level()).with_writer(std::io::stderr);
    // Reporting a failed write to standard error would fail as well, and panic.
    log.log_internal_errors(false).init();
    exit_when_a_gpu_is_lost();
    let command = Cli::parse().command;
    if command.only_prints() {
        exit_on_closed_pipe();
    }
    let level = lockstep_kernels::cpu::Level::from_env().map(drop);
    let valid = level.and(lockstep_kernels::Device::type_from_env().map(drop));
    // A tensor that does not fit is an error like any other.
    let run = || lockstep_kernels::OutOfMemory::catch(|| command.run())?;
    valid.map_err(anyhow::Error::msg).and_then(|()| run()).unwrap_or_else(|error| {
        print::print_error!("error: {}", print::with_causes(&error));
        ExitCode::FAILURE
    })
}

impl Command {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Command::Init(args) => init::run(args),
            Command::Presets(args) => presets::run(args),
            Command::Train(args) => train::run(args),
            Command::Plan(args) => plan::run(args),
            Command::Verify(args) => verify::run(args),
            Command::Trace(args) => trace::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Dash(args) => dash::run(args),
            Command::Generate(args) => generate::run(args),
            Command::Launch(args) => launch::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Import(args) => import::run(args),
            Command::Export(args) => export::run(args),
            Command::Ckpt(args) => ckpt::run(args),
            Command::Data(args) => data::run(args),
            Command::Trees(args) => trees::run(args),
            Command::Completions(args) => completions::run(args, Cli::command()),
        }
    }

    /// Whether the command may exit when its output is closed. Commands with ranks continue.
    fn only_prints(&self) -> bool {
        match self {
            Command::Train(_) | Command::Verify(_) | Command::Launch(_) => false,
            Command::Bench(args) => !args.has_ranks(),
            Command::Trees(args) => !args.has_ranks(),
            Command::Init(_)
            | Command::Presets(_)
            | Command::Completions(_)
            | Command::Plan(_)
            | Command::Trace(_)
            | Command::Doctor(_)
            | Command::Dash(_)
            | Command::Generate(_)
            | Command::Import(_)
            | Command::Export(_)
            | Command::Ckpt(_)
            | Command::Data(_) => true,
        }
    }
}

/// Exits at once if any thread finds that its GPU has failed: the launcher continues without this rank if it can.
fn exit_when_a_gpu_is_lost() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if let Some(lost) = panic.payload().downcast_ref::<lockstep_cuda::DeviceLost>() {
            print::print_error!("error: {lost}");
            std::process::exit(lockstep_launch::EXIT_DEVICE_LOST);
        }
        usual(panic);
    }));
}

/// Restores the default action of SIGPIPE, so that `lockstep data inspect … | head` exits quietly. The Rust runtime
/// ignores SIGPIPE, and `println!` would panic.
fn exit_on_closed_pipe() {
    // SAFETY: SIG_DFL installs no handler, and no other thread has been started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Log level of standard error, from LOCKSTEP_LOG: error, warn (default), info, debug or trace.
fn log_level() -> LevelFilter {
    let level = std::env::var("LOCKSTEP_LOG").ok();
    level.and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::WARN)
}
