//! The error of an allocation that does not fit.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::{Location, MemoryUsage, Tag};

/// An allocation that did not fit, with what holds the memory. A tensor that cannot be allocated panics with this value.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// Bytes requested.
    pub bytes: usize,
    pub tag: Tag,
    /// Memory in use.
    pub usage: MemoryUsage,
    /// The memory, with its free and total size.
    pub place: String,
    pub location: Location,
}

impl OutOfMemory {
    /// Calls `f`, and returns the panic of a tensor that could not be allocated as an error. Other panics go on. State
    /// that `f` changed must not be used after an error.
    pub fn catch<R>(f: impl FnOnce() -> R) -> Result<R, OutOfMemory> {
        catch_unwind(AssertUnwindSafe(f)).map_err(|panic| match panic.downcast::<OutOfMemory>() {
            Ok(error) => *error,
            Err(panic) => resume_unwind(panic),
        })
    }
}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        let held =
            Tag::ALL.map(|tag| format!("{} {} MiB", tag.name(), mib(self.usage.of(tag).now)));
        write!(
            f,
            "out of memory: {} MiB for {} do not fit on {}; this rank holds {}, in {} MiB of reserved memory",
            mib(self.bytes),
            self.tag.name(),
            self.place,
            held.join(", "),
            self.usage.reserved >> 20
        )
    }
}

impl std::error::Error for OutOfMemory {}
