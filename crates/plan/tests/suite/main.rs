//! Run files in, plans or mistakes out. One binary, to link once.

mod context;
mod example;
mod learning_rate;
mod ledger;
mod mistakes;
mod plans;
mod presets;
mod schedule_lists;
mod schedule_text;
mod schedule_times;
mod traffic;
mod typed;
