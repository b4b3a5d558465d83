//! `lockstep bench …`: measurements that print tables, one file per table.

use std::process::ExitCode;

pub mod case;
pub mod comm;
pub mod gemm;
pub mod machine;
pub mod private;
pub mod step;
pub mod table;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Comm(comm::Args),
    Gemm(gemm::Args),
    Machine(machine::Args),
    Step(step::Args),
}

impl Args {
    /// Whether what is measured are ranks at work.
    pub fn has_ranks(&self) -> bool {
        matches!(self.what, What::Comm(_) | What::Machine(_) | What::Step(_))
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Comm(args) => comm::run(args),
        What::Gemm(args) => gemm::run(args),
        What::Machine(args) => machine::run(args),
        What::Step(args) => step::run(args),
    }
}
