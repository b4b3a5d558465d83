//! Training under an MPI launcher: `mpirun -n 4 under_mpi trees`. The model has the same bytes as on one rank.
//! `scripts/test-mpi.sh` runs it and checks the output.

#[path = "suite/support.rs"]
#[allow(dead_code, reason = "only some helpers of the suite apply")]
mod support;

use std::time::Duration;

use lockstep_comm::{Options, World};
use lockstep_gbdt::{ModelFormat, Objective, Params};
use support::{binary, mixed, train, train_rank};

fn main() {
    if std::env::args().nth(1).as_deref() != Some("trees") {
        // `cargo test` runs every test binary; without a launcher there is nothing to test.
        return println!("skipped; scripts/test-mpi.sh runs this with mpirun");
    }
    let options = Options {
        heartbeat: Duration::from_secs(2),
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let world = World::join_mpi(&options).expect("the world starts");
    let data = binary(mixed(1000));
    for subsample in [1.0, 0.5] {
        let params =
            Params { objective: Objective::Logistic, rounds: 6, subsample, ..Params::default() };
        let together = train_rank(&world, &data, &params, 1).to_bytes(ModelFormat::Ubj);
        let alone = train(&data, &params, 1, 1).to_bytes(ModelFormat::Ubj);
        assert!(together == alone, "the model differs from that of one rank");
    }
    println!("PASS rank {}", world.rank());
}
