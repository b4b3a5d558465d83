//! Sharded results against one rank, for every group size. One binary, to link once.

mod compress;
mod context;
