//! Bars for long work, on standard error while a terminal is there. Gone when the work is done: what came of it is
//! for its command to say.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use lockstep_ckpt::{Named, Tensors};

/// A bar that counts bytes; it knows the whole if the input does.
pub fn bytes(act: &'static str, total: Option<u64>) -> ProgressBar {
    let known = "{prefix} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}";
    let (bar, template) = match total {
        Some(total) => (ProgressBar::new(total), known),
        None => (ProgressBar::no_length(), "{prefix} {spinner} {bytes} {bytes_per_sec}"),
    };
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    bar.with_style(style).with_prefix(act).with_finish(ProgressFinish::AndClear)
}

/// Tensors that show how many of their bytes have been read.
pub struct Watched<'a> {
    tensors: &'a dyn Tensors,
    bar: ProgressBar,
}

impl<'a> Watched<'a> {
    pub fn new(act: &'static str, tensors: &'a dyn Tensors) -> Watched<'a> {
        let elements: usize = tensors.list().iter().map(Named::len).sum();
        Watched { tensors, bar: bytes(act, Some(size_of::<f32>() as u64 * elements as u64)) }
    }
}

impl Tensors for Watched<'_> {
    fn list(&self) -> &[Named] {
        self.tensors.list()
    }

    fn read(&self, name: &str, out: &mut [f32]) -> lockstep_ckpt::Result<()> {
        self.tensors.read(name, out)?;
        self.bar.inc(size_of_val(out) as u64);
        Ok(())
    }
}
