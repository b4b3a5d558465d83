//! How much memory is held, by what it is for.

/// What a piece of memory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Tag {
    Parameters,
    Gradients,
    Optimizer,
    Activations,
    /// Everything that lives for an operation: working buffers, inputs, what is sent and received.
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

/// Bytes held now, and the most that were held at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    pub now: usize,
    pub peak: usize,
}

impl Usage {
    pub(super) fn take(&mut self, bytes: usize) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    pub(super) fn give(&mut self, bytes: usize) {
        self.now -= bytes;
    }
}

/// What tensors hold of a device, to the byte: what was asked for, without the pool's rounding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Memory {
    pub(super) by_tag: [Usage; Tag::ALL.len()],
    /// All tags together. Its peak is less than the sum of peaks: they come at different moments.
    pub total: Usage,
    /// What the pool has taken from the system.
    pub reserved: usize,
}

impl Memory {
    /// What is held for one purpose.
    pub fn of(&self, tag: Tag) -> Usage {
        self.by_tag[tag as usize]
    }

    pub(super) fn take(&mut self, tag: Tag, bytes: usize) {
        self.by_tag[tag as usize].take(bytes);
        self.total.take(bytes);
    }

    pub(super) fn give(&mut self, tag: Tag, bytes: usize) {
        self.by_tag[tag as usize].give(bytes);
        self.total.give(bytes);
    }
}
