//! Training as a whole: against PyTorch, against itself on several ranks, without allocations, within the
//! planned memory, and when numbers go wrong.

mod allocations;
mod alone;
mod compressed;
mod cuts;
mod hosts;
mod layouts;
mod memory;
mod not_finite;
mod plans;
mod pytorch;
mod ranks;
mod resume;
mod rows;
mod text;
mod traffic;
