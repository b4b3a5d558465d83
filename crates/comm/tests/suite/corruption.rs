//! Data that is changed on its way between ranks: detected and reported by all ranks, with or without encryption.

use crate::processes::{Topology, on_processes, tcp};
use crate::ranks::{TestRank, options, spawn};
use crate::slow_network::{proxy, through};
use lockstep_comm::{Cause, Error, Op};

/// One bit of an all-reduce of `count` floats is flipped.
fn flip_a_bit(test: &str, world: &str, topology: Topology, count: usize) {
    let proxy = proxy(Default::default());
    let reduce = |rank: &TestRank| -> Result<(), Error> {
        let world = rank.join()?;
        for round in 0.. {
            let mut buffer = vec![world.rank() as f32; count];
            world.all_reduce(&mut buffer, Op::Sum)?;
            assert!(buffer.iter().all(|x| *x == 1.0), "wrong result in round {round}");
            if round == 2 {
                rank.mark("working");
            }
        }
        Ok(())
    };
    let topology = through(proxy.as_ref(), topology);
    let Some(mut ranks) = spawn(test, world, topology, options(), reduce) else { return };
    ranks.wait_for_mark("working", 0..2);
    let proxy = proxy.expect("this is not a rank");
    proxy.flip_a_bit(2000);
    for rank in 0..2 {
        let error = ranks.error(rank);
        assert_eq!(error.cause, Some(Cause::Corrupt), "{}", error.text);
        let reason = if topology.encrypt { "encrypted data was changed" } else { "checksum" };
        assert!(error.text.contains(reason), "{}", error.text);
    }
}

/// The checksum of a short message is in its header, that of a long one behind it.
#[test]
fn a_bit_flipped_on_the_wire_is_detected() {
    let test = "corruption::a_bit_flipped_on_the_wire_is_detected";
    for (world, count) in [("short", 5_000), ("long", 1 << 20)] {
        flip_a_bit(test, world, tcp(2), count);
        let encrypted = Topology { encrypt: true, ..tcp(2) };
        flip_a_bit(test, &format!("{world}-encrypted"), encrypted, count);
    }
}

#[test]
fn encrypted_worlds_compute_the_same() {
    let test = "corruption::encrypted_worlds_compute_the_same";
    let topology = Topology { encrypt: true, ..tcp(3) };
    on_processes(test, "world", topology, |world| {
        let (me, n) = (world.rank(), world.size());
        for len in [0, 1, 1000, 65_536, 700_000] {
            let mut numbers = vec![me as f32; len];
            world.all_reduce(&mut numbers, Op::Sum).expect("the network works");
            assert!(numbers.iter().all(|x| *x == 3.0), "{len}");
            let started = world.start_send(vec![me as f32; len], (me + 1) % n);
            world.receive(&mut numbers, (me + n - 1) % n).expect("the network works");
            started.wait().expect("the network works");
            assert!(numbers.iter().all(|x| *x == ((me + n - 1) % n) as f32), "{len}");
        }
    });
}
