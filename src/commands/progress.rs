//! A bar for the passing of tensors: shown when a terminal is there, and only when the work is long.

use lockstep_ckpt::{Named, Tensors};
use std::cell::Cell;
use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

/// Tensors that show how many of their bytes have been read.
pub struct Progress<'a> {
    tensors: &'a dyn Tensors,
    act: &'static str,
    total: usize,
    done: Cell<usize>,
    shown: Cell<Option<Instant>>,
}

/// Between two drawings, and before the first.
const PAUSE: Duration = Duration::from_millis(200);
const WIDTH: usize = 30;

impl<'a> Progress<'a> {
    pub fn new(act: &'static str, tensors: &'a dyn Tensors) -> Progress<'a> {
        let total = tensors.list().iter().map(Named::len).sum();
        let shown = stderr().is_terminal().then(Instant::now);
        Progress { tensors, act, total, done: Cell::new(0), shown: Cell::new(shown) }
    }

    /// Elements of all tensors.
    pub fn total(&self) -> usize {
        self.total
    }

    fn draw(&self) {
        let filled = WIDTH * self.done.get() / self.total.max(1);
        let percent = 100 * self.done.get() / self.total.max(1);
        let bar = format!("{}{}", "█".repeat(filled), "░".repeat(WIDTH - filled));
        let end = if self.done.get() == self.total { "\n" } else { "" };
        // A terminal that went away is no reason to fail.
        let _ = write!(stderr(), "\r{} {bar} {percent:>3}%{end}", self.act);
    }
}

impl Tensors for Progress<'_> {
    fn list(&self) -> &[Named] {
        self.tensors.list()
    }

    fn read(&self, name: &str, out: &mut [f32]) {
        self.tensors.read(name, out);
        self.done.set(self.done.get() + out.len());
        if self.shown.get().is_some_and(|shown| shown.elapsed() > PAUSE) {
            self.draw();
            self.shown.set(Some(Instant::now()));
        }
    }
}
