//! The collectives against a plain reference, and what happens when things go wrong, on every kind of
//! world. One binary, to link once.

mod collectives;
mod disagreements;
mod failures;
mod processes;
mod ranks;
mod reference;
mod rendezvous;
mod strangers;
