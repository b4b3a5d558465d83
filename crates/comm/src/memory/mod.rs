//! What the ranks of a host share: memory, and the protocols on it. Knows no collectives.

pub(crate) mod arena;
pub(crate) mod bell;
pub(crate) mod channel;
pub(crate) mod copy;
pub(crate) mod cursors;
pub(crate) mod heap;
#[cfg(all(loom, test))]
pub(crate) mod loom_models;
pub(crate) mod pages;
pub(crate) mod reach;
pub(crate) mod scratch;
pub(crate) mod segment;
pub(crate) mod stage;
pub(crate) mod symmetric;
pub(crate) mod sync;
