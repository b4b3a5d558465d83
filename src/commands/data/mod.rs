//! `lockstep data`: creates and inspects token files.

mod inspect;
mod prepare;

use std::process::ExitCode;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Prepare(prepare::Args),
    Inspect(inspect::Args),
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Prepare(args) => prepare::run(args),
        Command::Inspect(args) => inspect::run(args),
    }
}
