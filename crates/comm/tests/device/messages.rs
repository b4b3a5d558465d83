//! Messages on device memory.

use crate::memory::DeviceVec;
use crate::{gpu, open, open_nccl};
use lockstep_comm::{Cause, DeviceEngine, DeviceGroup, Op, Options, World};
use lockstep_comm::{on_threads, on_threads_with};
use lockstep_cuda::{Gpu, Stream};
use std::time::Duration;

/// The first connects the ranks without a kernel; the last is larger than the buffers of NCCL.
const LENGTHS: [usize; 6] = [0, 1, 777, 65_536, 300_000, 4_000_001];

/// All ranks have prepared their buffers. Allocations wait for all kernels of a process, and kernels of NCCL for the other
/// ranks.
fn prepared(world: &World, stream: &Stream) {
    stream.synchronize();
    world.barrier().unwrap();
}

/// Every rank sends three messages to the next and receives those of the one before, from two threads.
fn ring(world: &World, gpu: &Gpu, device: &DeviceGroup) {
    let (me, ranks) = (world.rank(), world.size());
    let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
    for len in LENGTHS {
        let out = Stream::new(gpu.context.clone());
        let message = DeviceVec::new(gpu, &out, 1, &vec![me as f32; len]);
        let inc = Stream::new(gpu.context.clone());
        let arrived = DeviceVec::new(gpu, &inc, 3, &vec![-1.0f32; len]);
        out.synchronize();
        prepared(world, &inc);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    device.send(&out, message.slice(), next).unwrap();
                }
                // Later operations may overwrite the message.
                message.write(&out, &vec![-2.0; len]);
            });
            for _ in 0..3 {
                device.receive(&inc, arrived.slice(), before).unwrap();
            }
        });
        assert_eq!(arrived.read(&inc), vec![before as f32; len], "{len} elements, {ranks} ranks");
        out.synchronize();
        world.barrier().unwrap();
    }
}

#[test]
fn messages_travel_around_a_ring() {
    let Some(gpu) = gpu("messages_travel_around_a_ring") else { return };
    for ranks in [2, 3, 8] {
        on_threads(ranks, |world| ring(&world, &gpu, &open(&world, &gpu, DeviceEngine::Shared)));
    }
}

#[test]
fn messages_of_nccl_travel_around_a_ring() {
    let Some(gpu) = gpu("messages_of_nccl_travel_around_a_ring") else { return };
    for ranks in [2, 4, 8] {
        on_threads(ranks, |world| {
            let Some(device) = open_nccl(&world, &gpu) else { return };
            ring(&world, &gpu, &device);
            println!("nccl: rank {} of a ring of {ranks} has received all", world.rank());
        });
    }
}

/// Every rank starts several messages to and from every other before it waits for one, in an order that differs between
/// ranks. Messages between two ranks arrive in order.
fn all_pairs(world: &World, gpu: &Gpu, device: &DeviceGroup) {
    const IN_FLIGHT: usize = 4;
    let (me, ranks) = (world.rank(), world.size());
    let value = |from: usize, to: usize, number: usize| (100 * from + 10 * to + number) as f32;
    let peers = (1..ranks).map(|step| (me + step) % ranks);
    let calls: Vec<(usize, usize)> =
        peers.flat_map(|peer| (0..IN_FLIGHT).map(move |number| (peer, number))).collect();
    for len in LENGTHS {
        let stream = Stream::new(gpu.context.clone());
        let filled = |value: f32| DeviceVec::new(gpu, &stream, 1, &vec![value; len]);
        let outgoing: Vec<_> = calls.iter().map(|(to, n)| filled(value(me, *to, *n))).collect();
        let incoming: Vec<_> = calls.iter().map(|_| filled(-1.0)).collect();
        prepared(world, &stream);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for ((peer, _), (out, inc)) in calls.iter().zip(outgoing.into_iter().zip(incoming)) {
            let (from, to) = (out.slice(), inc.slice());
            sends.push(device.start_send(stream.record(), from, out, *peer));
            receives.push(device.start_receive(stream.record(), to, inc, *peer));
        }
        let mut kept = Vec::new();
        for ((from, number), receive) in calls.iter().zip(receives) {
            let (vector, done) = receive.wait().unwrap();
            stream.wait_for(&done);
            let want = vec![value(*from, me, *number); len];
            assert!(
                vector.read(&stream) == want,
                "message {number} of rank {from}, {len} elements"
            );
            kept.push(vector);
        }
        for send in sends {
            let (vector, done) = send.wait().unwrap();
            done.wait();
            kept.push(vector);
        }
        // Freeing waits for the kernels of all ranks.
        world.barrier().unwrap();
    }
}

#[test]
fn messages_in_both_directions_at_once() {
    let Some(gpu) = gpu("messages_in_both_directions_at_once") else { return };
    for ranks in [2, 4] {
        on_threads(ranks, |world| {
            all_pairs(&world, &gpu, &open(&world, &gpu, DeviceEngine::Shared));
        });
    }
}

#[test]
fn messages_of_nccl_in_both_directions_at_once() {
    let Some(gpu) = gpu("messages_of_nccl_in_both_directions_at_once") else { return };
    for ranks in [2, 4] {
        on_threads(ranks, |world| {
            let Some(device) = open_nccl(&world, &gpu) else { return };
            all_pairs(&world, &gpu, &device);
            println!("nccl: rank {} of {ranks} has exchanged all messages", world.rank());
        });
    }
}

/// Messages and collectives of one group do not wait for each other: rank 0 starts a message before an all-reduce that
/// rank 1 enters before it receives.
#[test]
fn messages_of_nccl_do_not_wait_for_collectives() {
    let Some(gpu) = gpu("messages_of_nccl_do_not_wait_for_collectives") else { return };
    on_threads(2, |world| {
        let Some(device) = open_nccl(&world, &gpu) else { return };
        let (me, len) = (world.rank(), 1_000_000);
        let stream = Stream::new(gpu.context.clone());
        let mut message = DeviceVec::new(&gpu, &stream, 0, &vec![me as f32; len]);
        let sum = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; len]);
        for _ in 0..10 {
            prepared(&world, &stream);
            let reduce = || device.all_reduce(&stream, sum.slice(), sum.slice(), Op::Max).unwrap();
            if me == 0 {
                let slice = message.slice();
                let sent = device.start_send(stream.record(), slice, message, 1);
                reduce();
                let (vector, done) = sent.wait().unwrap();
                stream.wait_for(&done);
                message = vector;
            } else {
                reduce();
                device.receive(&stream, message.slice(), 0).unwrap();
            }
        }
        assert_eq!(message.read(&stream), vec![0.0; len]);
        assert_eq!(sum.read(&stream), vec![1.0; len]);
        world.barrier().unwrap();
    });
}

#[test]
fn failed_messages_of_nccl_are_reported() {
    let Some(gpu) = gpu("failed_messages_of_nccl_are_reported") else { return };
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    for case in ["mismatched lengths", "never received"] {
        on_threads_with(&options, 2, |world| {
            let Some(device) = open_nccl(&world, &gpu) else { return };
            let stream = Stream::new(gpu.context.clone());
            let long = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 4_000_000]);
            let short = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 3_000_000]);
            prepared(&world, &stream);
            let message = |vector: &DeviceVec<f32>| match world.rank() {
                0 => device.send(&stream, vector.slice(), 1),
                _ => device.receive(&stream, vector.slice(), 0),
            };
            message(&long).unwrap();
            prepared(&world, &stream);
            let result = match (case, world.rank()) {
                ("never received", 1) => return std::thread::sleep(Duration::from_secs(5)),
                ("mismatched lengths", 1) => message(&short),
                _ => message(&long),
            };
            // The stream goes on when the communicator is aborted.
            stream.synchronize();
            let error = result.and_then(|()| world.barrier()).unwrap_err();
            println!("nccl, {case}: {error}");
            let causes = [Cause::Disagreed, Cause::Late, Cause::Left];
            assert!(error.cause().is_some_and(|cause| causes.contains(&cause)), "{error}");
        });
    }
}
