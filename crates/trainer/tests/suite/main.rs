//! Training as a whole: against PyTorch, against itself on several ranks, without allocations, within the
//! planned memory, and when numbers go wrong.

mod allocations;
mod alone;
mod cuts;
mod layouts;
mod memory;
mod not_finite;
mod plans;
mod pytorch;
mod ranks;
mod reshard;
mod resume;
mod saving;
mod text;
mod traffic;
