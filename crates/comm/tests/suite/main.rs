//! The collectives against a plain reference, and what happens when things go wrong, on every kind of
//! world. One binary, to link once.

mod check;
mod collectives;
mod dice;
mod disagreements;
mod exactness;
mod failures;
mod groups;
mod processes;
mod ranks;
mod reference;
mod rendezvous;
mod started;
mod strangers;
mod symmetric;
mod traffic;
