//! Authenticated connections between ranks, over socket pairs and loopback.

mod connect;
mod frames;
mod handshake;
mod listener;
mod parsers;
mod support;
