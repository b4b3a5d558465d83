//! The authenticated connections between ranks, over socket pairs.

mod frames;
mod handshake;
mod parsers;
mod support;
