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

pub(crate) use {print_error, print_line, print_part};
