//! The vocabulary of a run as pure values: what was typed, and what it means. Does no I/O, reads no clock,
//! starts no thread.

pub mod model;
