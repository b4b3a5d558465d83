//! The message of a panic: what to report, before the location and the backtrace.

use lockstep_kernels::OutOfMemory;

use crate::VERSION;
use crate::print::print_error;

/// Prints a sentence before the message of each panic. A tensor that does not fit is no bug: it is reported as an error.
pub fn install() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.payload().is::<OutOfMemory>() {
            print_error!("{}", what_to_report());
            default(panic);
        }
    }));
}

fn what_to_report() -> String {
    let command: Vec<String> =
        std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    format!(
        "lockstep {VERSION} failed because of a bug. Please report the lines below and the command `{}`; of a run, also \
         plan.json and the folder logs. Checkpoints are not affected: --resume continues from the newest.",
        command.join(" ")
    )
}
