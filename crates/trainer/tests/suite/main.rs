//! Training as a whole: against PyTorch, against itself on several ranks, without allocations, within the
//! planned memory, and when numbers, data, machines or links go wrong.

mod allocations;
mod compressed;
mod corrupt;
mod cuts;
mod hosts;
mod layouts;
mod links;
mod memory;
mod not_finite;
mod plans;
mod pytorch;
mod rank_zero;
mod ranks;
mod reductions;
mod replays;
mod reshard;
mod resume;
mod rows;
mod saving;
mod stragglers;
mod text;
mod traffic;
