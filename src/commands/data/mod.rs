//! `lockstep data`: from text to token files, and what is inside them.

mod inspect;
mod prepare;

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Prepare(prepare::Args),
    Inspect(inspect::Args),
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.what {
        What::Prepare(args) => prepare::run(args),
        What::Inspect(args) => inspect::run(args),
    }
}
