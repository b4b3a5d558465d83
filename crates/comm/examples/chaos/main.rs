//! Chaos: ranks that call mixed collectives while a driver kills or stops one of them at random, and
//! checks that every survivor names the right rank, in time, and that nothing is left behind.
//!
//! `chaos drive --kills 100 --stops 20 --ranks 4 --engine shm` runs it; without arguments the program
//! is one of the ranks, started by the driver.

mod drive;
mod rank;

/// As in the program itself: large buffers are reached in place.
#[global_allocator]
static HEAP: lockstep_comm::SharedHeap = lockstep_comm::SharedHeap;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let code = match arguments.split_first() {
        None => rank::run(),
        Some((word, rest)) if word == "drive" => match drive::Plan::parse(rest) {
            Ok(plan) => drive::run(&plan),
            Err(mistake) => usage(&mistake),
        },
        Some((word, _)) => usage(&format!("{word} is no command")),
    };
    std::process::exit(code);
}

fn usage(mistake: &str) -> i32 {
    eprintln!("{mistake}");
    eprintln!(
        "chaos drive [--kills N] [--stops N] [--ranks N] [--engine shm|tcp] [--heartbeat-ms N]"
    );
    2
}
