//! The program under test.

#![allow(dead_code)] // not every test binary uses all of it

use std::process::Command;

/// The program, on the device of [`choose_device`].
pub fn lockstep() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    choose_device(&mut command);
    command
}

/// Lets a command compute on the CPU unless `LOCKSTEP_DEVICE` names another device. Results must not depend on whether
/// the machine has a GPU.
pub fn choose_device(command: &mut Command) {
    if std::env::var_os("LOCKSTEP_DEVICE").is_none() {
        command.env("LOCKSTEP_DEVICE", "cpu");
    }
}
