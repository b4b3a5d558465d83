//! Chaos test: ranks call random collectives while a driver kills or stops one of them at a random time, and
//! checks that every survivor blames the right rank in time and that no files are left.
//!
//! Run `chaos drive --kills 100 --stops 20 --ranks 4 --engine shm`. Without arguments the program is one of
//! the ranks, started by the driver.

mod drive;
mod rank;

/// As in the `lockstep` binary: large buffers are accessed in place.
#[global_allocator]
static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let code = match arguments.split_first() {
        None => rank::run(),
        Some((command, rest)) if command == "drive" => match drive::Plan::parse(rest) {
            Ok(plan) => drive::run(&plan),
            Err(error) => usage(&error),
        },
        Some((command, _)) => usage(&format!("unknown command {command}")),
    };
    std::process::exit(code);
}

fn usage(error: &str) -> i32 {
    eprintln!("{error}");
    eprintln!(
        "chaos drive [--kills N] [--stops N] [--ranks N] [--engine shm|tcp] [--heartbeat-ms N]"
    );
    2
}
