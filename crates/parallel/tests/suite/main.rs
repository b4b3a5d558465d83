//! The axes against one rank. One binary, to link once.

mod context;
