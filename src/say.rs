//! Printing where there are ranks. A reader of standard output that went away (`| head`), or a full disk behind it,
//! ends no training, so that is passed over; commands that only print end with their reader instead (see `main.rs`).

/// `println!` that nobody needs to read.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        // Nothing is lost that could still be seen.
        let _ = writeln!(std::io::stdout(), $($words)*);
    }};
}

/// `print!` that nobody needs to read; seen at once, also by a launcher that passes it on.
macro_rules! say_part {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let mut out = std::io::stdout();
        let _ = write!(out, $($words)*).and_then(|()| out.flush());
    }};
}

/// `eprintln!` that nobody needs to read: standard error may be a file on a full disk, or closed.
macro_rules! complain {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($words)*);
    }};
}

pub(crate) use {complain, say, say_part};
