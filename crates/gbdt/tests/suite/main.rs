//! Tests of trees across ranks, threads and files.

#[cfg(feature = "arrow")]
mod arrow;
mod edges;
mod explanations;
mod files;
mod identical;
mod learning;
mod mutations;
mod recovery;
mod support;
mod traffic;
