//! The command line: one file per command, each a thin layer over the crates.

mod commands;
mod consistency;
mod machine;
mod print;
mod run_file;
mod stop;
mod supervise;
mod world;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use commands::{bench, ckpt, data, export, generate, import, launch, plan, train, verify};
use tracing_subscriber::filter::LevelFilter;

/// Large buffers lie where the other ranks of the host can reach them.
#[global_allocator]
static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;

/// Trains one model on many ranks.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Plan(plan::Args),
    Verify(verify::Args),
    Generate(generate::Args),
    Launch(launch::Args),
    /// Measure this machine
    Bench(bench::Args),
    Import(import::Args),
    Export(export::Args),
    /// Look into checkpoints, check and compare them
    Ckpt(ckpt::Args),
    /// Make token files, and look inside them
    Data(data::Args),
}

fn main() -> ExitCode {
    let log = tracing_subscriber::fmt().with_max_level(log_level()).with_writer(std::io::stderr);
    // What it cannot write it would complain of to the same place, and panic there.
    log.log_internal_errors(false).init();
    let command = Cli::parse().command;
    if command.only_prints() {
        end_with_reader();
    }
    let known = lockstep_kernels::cpu::Level::from_env().map_err(anyhow::Error::msg);
    known.and_then(|_| command.run()).unwrap_or_else(|error| {
        // With its causes, but without a backtrace: most are a user's mistakes.
        print::print_error!("error: {error:#}");
        ExitCode::FAILURE
    })
}

impl Command {
    fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Command::Train(args) => train::run(args),
            Command::Plan(args) => plan::run(args),
            Command::Verify(args) => verify::run(args),
            Command::Generate(args) => generate::run(args),
            Command::Launch(args) => launch::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Import(args) => import::run(args),
            Command::Export(args) => export::run(args),
            Command::Ckpt(args) => ckpt::run(args),
            Command::Data(args) => data::run(args),
        }
    }

    /// Whether nothing is lost when it ends because nobody reads what it prints. Ranks are something to lose.
    fn only_prints(&self) -> bool {
        match self {
            Command::Train(_) | Command::Verify(_) | Command::Launch(_) => false,
            Command::Bench(args) => !args.has_ranks(),
            Command::Plan(_)
            | Command::Generate(_)
            | Command::Import(_)
            | Command::Export(_)
            | Command::Ckpt(_)
            | Command::Data(_) => true,
        }
    }
}

/// Has the system end this process, as it ends others, when it writes to a pipe that nobody reads:
/// `lockstep data inspect … | head`. Rust's start ignores that signal, and printing would panic.
fn end_with_reader() {
    // SAFETY: the default action is no handler of ours, and no other thread has been started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// How much is told on standard error: LOCKSTEP_LOG=error, warn, info, debug or trace.
fn log_level() -> LevelFilter {
    let typed = std::env::var("LOCKSTEP_LOG").ok();
    typed.and_then(|level| level.parse().ok()).unwrap_or(LevelFilter::WARN)
}
