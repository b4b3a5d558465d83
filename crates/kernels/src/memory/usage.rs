//! Memory counters, by purpose.

/// Purpose of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Tag {
    Parameters,
    Gradients,
    Optimizer,
    Activations,
    /// Data that lives for one operation: workspaces, inputs, messages sent and received.
    Buffers,
}

impl Tag {
    pub const ALL: [Tag; 5] =
        [Tag::Parameters, Tag::Gradients, Tag::Optimizer, Tag::Activations, Tag::Buffers];

    pub fn name(self) -> &'static str {
        match self {
            Tag::Parameters => "parameters",
            Tag::Gradients => "gradients",
            Tag::Optimizer => "optimizer",
            Tag::Activations => "activations",
            Tag::Buffers => "buffers",
        }
    }
}

/// Bytes allocated now, and the peak.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    pub now: usize,
    pub peak: usize,
}

impl Usage {
    pub(super) fn add(&mut self, bytes: usize) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(super) fn remove(&mut self, bytes: usize) {
        self.now -= bytes;
    }
}

/// Bytes that tensors occupy on a device, exactly as requested (without the pool's rounding).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MemoryUsage {
    pub(super) by_tag: [Usage; Tag::ALL.len()],
    /// All tags together. Its peak is at most the sum of the tags' peaks, which occur at different times.
    pub total: Usage,
    /// Bytes that the pool has allocated from the system.
    pub reserved: usize,
}

impl MemoryUsage {
    /// Usage of one purpose.
    pub fn of(&self, tag: Tag) -> Usage {
        self.by_tag[tag as usize]
    }

    pub(super) fn add(&mut self, tag: Tag, bytes: usize) {
        self.by_tag[tag as usize].add(bytes);
        self.total.add(bytes);
    }

    pub(super) fn remove(&mut self, tag: Tag, bytes: usize) {
        self.by_tag[tag as usize].remove(bytes);
        self.total.remove(bytes);
    }
}
