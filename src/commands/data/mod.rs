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

/// A bar on standard error while a terminal is there; it knows the whole if the input does.
fn progress(total: Option<u64>) -> indicatif::ProgressBar {
    let known = "{bar:30} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
    let (bar, template) = match total {
        Some(total) => (indicatif::ProgressBar::new(total), known),
        None => (indicatif::ProgressBar::no_length(), "{spinner} {bytes} {bytes_per_sec}"),
    };
    let style = indicatif::ProgressStyle::with_template(template);
    bar.with_style(style.expect("the template is a constant"))
}

/// 12,345,678
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}
