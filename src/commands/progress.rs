//! Progress bars on standard error, if it is a terminal. They disappear when the work is done.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use lockstep_ckpt::{Named, Tensors};

/// Option of commands that show progress.
#[derive(clap::Args, Clone, Copy)]
pub struct Quiet {
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

impl Quiet {
    /// A progress bar that counts bytes, or a spinner if the total is unknown.
    pub fn bytes(self, label: &'static str, total: Option<u64>) -> ProgressBar {
        let with_total = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
        let (bar, template) = match total {
            Some(total) => (ProgressBar::new(total), with_total),
            None => (ProgressBar::no_length(), "{prefix} {spinner} {bytes} {bytes_per_sec}"),
        };
        self.show(bar, label, template)
    }

    /// A spinner with the elapsed time, for work whose amount is unknown.
    pub fn spinner(self, label: &'static str) -> ProgressBar {
        let bar = self.show(ProgressBar::no_length(), label, "{prefix} {spinner} {elapsed}");
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }

    fn show(self, bar: ProgressBar, label: &'static str, template: &str) -> ProgressBar {
        if self.quiet {
            return ProgressBar::hidden();
        }
        let style = ProgressStyle::with_template(template).expect("the template is valid");
        bar.with_style(style).with_prefix(label).with_finish(ProgressFinish::AndClear)
    }
}

/// Tensors that advance a progress bar when they are read.
pub struct WithProgress<'a> {
    tensors: &'a dyn Tensors,
    bar: ProgressBar,
}

impl<'a> WithProgress<'a> {
    pub fn new(quiet: Quiet, label: &'static str, tensors: &'a dyn Tensors) -> WithProgress<'a> {
        let elements: usize = tensors.list().iter().map(Named::len).sum();
        let bytes = size_of::<f32>() as u64 * elements as u64;
        WithProgress { tensors, bar: quiet.bytes(label, Some(bytes)) }
    }
}

impl Tensors for WithProgress<'_> {
    fn list(&self) -> &[Named] {
        self.tensors.list()
    }

    fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        self.tensors.read(name, out)?;
        self.bar.inc(size_of_val(out) as u64);
        Ok(())
    }
}
