//! Reports in, lines and files out. One binary, to link once.

mod folder;
mod metrics;
mod step_line;
mod tensorboard;
mod trace;
