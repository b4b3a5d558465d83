//! The collectives against a plain reference, on every kind of world. One binary, to link once.

mod collectives;
mod dice;
mod exactness;
mod groups;
mod processes;
mod reference;
mod started;
mod symmetric;
mod traffic;
