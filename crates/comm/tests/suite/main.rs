//! The collectives against a plain reference, on every kind of world. One binary, to link once.

mod check;
mod collectives;
mod processes;
mod reference;
