//! Memory that the ranks of a host share, and the protocols on it. Knows nothing about collectives.

pub(crate) mod arena;
pub(crate) mod bell;
pub(crate) mod channel;
pub(crate) mod copy;
pub(crate) mod cross_process;
pub(crate) mod cursors;
pub(crate) mod heap;
#[cfg(all(loom, test))]
pub(crate) mod loom_models;
pub(crate) mod member;
pub(crate) mod pages;

pub(crate) mod scratch;
pub(crate) mod segment;
pub(crate) mod symmetric;
pub(crate) mod sync;
