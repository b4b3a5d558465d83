//! `lockstep bench …`: measurements that print tables, one file per table.

use std::process::ExitCode;

pub mod case;
pub mod comm;
pub mod gemm;
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
    Step(step::Args),
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Comm(args) => comm::run(args),
        What::Gemm(args) => gemm::run(args),
        What::Step(args) => step::run(args),
    }
}
