//! Tests of the training loop: against PyTorch, on many layouts, against the planned memory and traffic, and with
//! corrupt data, values that are not finite, failing disks and slow ranks or links.

mod allocations;
mod compressed;
mod corrupt;
mod cuts;
mod epochs;
mod fp8;
mod hosts;
mod layouts;
mod links;
mod memory;
mod not_finite;
mod offload;
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
mod timelines;
mod traffic;
