//! Collectives compared with a reference, and failures, on every kind of world. One binary, to link once.

mod check;
mod collectives;
mod corruption;
mod disagreements;
mod exactness;
mod failures;
mod groups;
mod processes;
#[path = "../../examples/proxy/proxy.rs"]
#[allow(dead_code)]
mod proxy;
mod random;
mod ranks;
mod reference;
mod rendezvous;
mod slow_network;
mod started;
mod strangers;
mod symmetric;
mod traffic;
