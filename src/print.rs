//! Printing that ignores errors. A closed standard output (`| head`) or a full disk must not stop a training; commands
//! that only print stop when their reader does (see `main.rs`).

use std::io::IsTerminal as _;
use std::sync::LazyLock;

/// `println!` that ignores errors.
macro_rules! print_line {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($words)*);
    }};
}

/// `print!` that ignores errors and flushes, so that a launcher forwards it immediately.
macro_rules! print_part {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let mut out = std::io::stdout();
        let _ = write!(out, $($words)*).and_then(|()| out.flush());
    }};
}

/// `eprintln!` that ignores errors, in one write: standard error has no buffer, and other processes write to it as well.
macro_rules! print_error {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let line = $crate::print::with_color(format!($($words)*)) + "\n";
        let _ = std::io::stderr().write_all(line.as_bytes());
    }};
}

/// Colors the label of an error or a warning if standard error is a terminal and NO_COLOR is not set.
pub fn with_color(text: String) -> String {
    static COLORED: LazyLock<bool> = LazyLock::new(|| {
        let off = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        !off && std::io::stderr().is_terminal()
    });
    if *COLORED { colored(text) } else { text }
}

fn colored(text: String) -> String {
    for (label, color) in [("error:", 31), ("warning:", 33), ("note:", 36)] {
        if let Some(rest) = text.strip_prefix(label) {
            return format!("\x1b[1;{color}m{label}\x1b[0m{rest}");
        }
    }
    text
}

/// An error and its causes, without a backtrace: most errors are user errors. Skips causes that the message contains.
pub fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

pub(crate) use {print_error, print_line, print_part};

#[cfg(test)]
mod tests {
    use super::{colored, with_causes};
    use anyhow::Context as _;

    #[test]
    fn labels_are_colored() {
        assert_eq!(colored("warning: hot".into()), "\x1b[1;33mwarning:\x1b[0m hot");
        assert_eq!(colored("no warning: cold".into()), "no warning: cold");
    }

    #[test]
    fn a_cause_is_printed_once() {
        let missing = lockstep_data::TokenFile::open("missing.tokens".as_ref());
        let error = with_causes(&missing.context("run.toml").unwrap_err());
        assert_eq!(error.matches("No such file").count(), 1, "{error}");
        assert!(error.starts_with("run.toml: opening missing.tokens: "), "{error}");
    }
}
