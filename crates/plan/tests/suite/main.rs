//! Run files in, plans or errors out. One binary, to link once.

mod config_errors;
mod context;
mod example;
mod layouts;
mod learning_rate;
mod ledger;
mod meshes;
mod plans;
mod presets;
mod refit;
mod schedule_lists;
mod schedule_text;
mod schedule_times;
mod slices;
mod traffic;
mod values;
