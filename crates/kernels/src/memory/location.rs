//! Which memory data is stored in.

/// The memory that a tensor or view is stored in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Location {
    /// Pageable host memory.
    Host,
    /// Page-locked host memory, which devices copy from and to asynchronously.
    Pinned,
    /// Memory of an accelerator, which the host cannot address.
    Device,
}

impl Location {
    /// Whether the host can read and write it through a pointer.
    pub fn is_host_accessible(self) -> bool {
        match self {
            Location::Host | Location::Pinned => true,
            Location::Device => false,
        }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Location::Host => "host",
            Location::Pinned => "pinned",
            Location::Device => "device",
        })
    }
}
