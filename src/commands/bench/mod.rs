//! `lockstep bench`: benchmarks, one file per benchmark.

use std::process::ExitCode;

pub mod case;
pub mod comm;
pub mod device;
pub mod gemm;
pub mod machine;
pub mod private;
pub mod step;
pub mod table;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Comm(comm::Args),
    Gemm(gemm::Args),
    Machine(machine::Args),
    Step(step::Args),
}

impl Args {
    /// Whether the benchmark starts ranks.
    pub fn has_ranks(&self) -> bool {
        matches!(self.command, Command::Comm(_) | Command::Machine(_) | Command::Step(_))
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Comm(args) => comm::run(args),
        Command::Gemm(args) => gemm::run(args),
        Command::Machine(args) => machine::run(args),
        Command::Step(args) => step::run(args),
    }
}
