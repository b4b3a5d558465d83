//! The axes against one rank, on every size of group. One binary, to link once.

mod compress;
mod context;
