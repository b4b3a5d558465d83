//! `lockstep completions`: prints a completion script for a shell.

use std::process::ExitCode;

use clap_complete::Shell;

/// Print a completion script for a shell
///
/// bash: lockstep completions bash > ~/.local/share/bash-completion/completions/lockstep
///
/// zsh: lockstep completions zsh > DIR/_lockstep, with DIR in $fpath
///
/// fish: lockstep completions fish > ~/.config/fish/completions/lockstep.fish
#[derive(clap::Args)]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Kind,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Kind {
    Bash,
    Zsh,
    Fish,
}

pub fn run(args: Args, mut program: clap::Command) -> anyhow::Result<ExitCode> {
    let shell = match args.shell {
        Kind::Bash => Shell::Bash,
        Kind::Zsh => Shell::Zsh,
        Kind::Fish => Shell::Fish,
    };
    clap_complete::generate(shell, &mut program, "lockstep", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}
