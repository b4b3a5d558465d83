//! Printing that ignores errors. A closed standard output (`| head`) or a full disk must not stop a training; commands
//! that only print stop when their reader does (see `main.rs`).

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

/// `eprintln!` that ignores errors.
macro_rules! print_error {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
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
    use super::with_causes;
    use anyhow::Context as _;

    #[test]
    fn a_cause_is_printed_once() {
        let missing = lockstep_data::TokenFile::open("missing.tokens".as_ref());
        let error = with_causes(&missing.context("run.toml").unwrap_err());
        assert_eq!(error.matches("No such file").count(), 1, "{error}");
        assert!(error.starts_with("run.toml: opening missing.tokens: "), "{error}");
    }
}
