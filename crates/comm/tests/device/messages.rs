//! Messages on device memory.

use crate::check::{check_ring, open};
use crate::deadline::{Deadline, LIMIT};
use crate::memory::DeviceVec;
use crate::{gpu, open_nccl};
use lockstep_comm::{Cause, DeviceEngine, DeviceGroup, MessagePeers, Op, Options, World};
use lockstep_comm::{on_threads, on_threads_with};
use lockstep_cuda::{Gpu, Stream};
use std::time::Duration;

/// The last is larger than the buffers of NCCL.
const LENGTHS: [usize; 6] = [0, 1, 777, 65_536, 300_000, 4_000_001];

/// All ranks have prepared their buffers. Allocations wait for all kernels of a process, and kernels of NCCL for the other
/// ranks.
fn prepared(world: &World, stream: &Stream) {
    stream.synchronize();
    world.barrier().unwrap();
}

/// A group of all ranks whose messages go through NCCL, if it can be used here.
fn connect_nccl(world: &World, gpu: &Gpu, peers: MessagePeers) -> Option<DeviceGroup> {
    let device = open_nccl(world, gpu)?;
    device.connect(peers).unwrap();
    Some(device)
}

#[test]
fn messages_travel_around_a_ring() {
    let Some(gpu) = gpu("messages_travel_around_a_ring") else { return };
    for ranks in [2, 3, 8] {
        on_threads(ranks, |world| check_ring(&world, &gpu, DeviceEngine::Shared));
    }
}

/// Every rank sends three messages to the next and receives those of the one before, from two threads.
#[test]
fn messages_of_nccl_travel_around_a_ring() {
    let test = "messages_of_nccl_travel_around_a_ring";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    for ranks in [2, 4, 8] {
        on_threads(ranks, |world| {
            let me = world.rank();
            deadline.step(me, format!("{ranks} ranks: connects"));
            let Some(device) = connect_nccl(&world, &gpu, MessagePeers::Neighbors) else { return };
            for len in LENGTHS {
                deadline.step(me, format!("{ranks} ranks: {len} elements"));
                ring(&world, &gpu, &device, len);
            }
            deadline.step(me, format!("{ranks} ranks: ends"));
            println!("nccl: rank {me} of a ring of {ranks} has received all");
        });
    }
}

fn ring(world: &World, gpu: &Gpu, device: &DeviceGroup, len: usize) {
    let (me, ranks) = (world.rank(), world.size());
    let (next, before) = ((me + 1) % ranks, (me + ranks - 1) % ranks);
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
    inc.synchronize();
    assert_eq!(arrived.read(&inc), vec![before as f32; len], "{len} elements, {ranks} ranks");
    out.synchronize();
    world.barrier().unwrap();
}

/// Every rank starts several messages to and from every other before it waits for one, in an order that differs between
/// ranks. Messages between two ranks arrive in order.
fn all_pairs(
    world: &World,
    gpu: &Gpu,
    device: &DeviceGroup,
    (len, in_flight): (usize, usize),
    step: impl Fn(&str),
) {
    let (me, ranks) = (world.rank(), world.size());
    let value = |from: usize, to: usize, number: usize| (100 * from + 10 * to + number) as f32;
    let peers = (1..ranks).map(|step| (me + step) % ranks);
    let calls: Vec<(usize, usize)> =
        peers.flat_map(|peer| (0..in_flight).map(move |number| (peer, number))).collect();
    let stream = Stream::new(gpu.context.clone());
    let filled = |value: f32| DeviceVec::new(gpu, &stream, 1, &vec![value; len]);
    let outgoing: Vec<_> = calls.iter().map(|(to, n)| filled(value(me, *to, *n))).collect();
    let incoming: Vec<_> = calls.iter().map(|_| filled(-1.0)).collect();
    step("prepares");
    prepared(world, &stream);
    let (mut sends, mut receives) = (Vec::new(), Vec::new());
    for ((peer, _), (out, inc)) in calls.iter().zip(outgoing.into_iter().zip(incoming)) {
        let (from, to) = (out.slice(), inc.slice());
        sends.push(device.start_send(stream.record(), from, out, *peer));
        receives.push(device.start_receive(stream.record(), to, inc, *peer));
    }
    let mut kept = Vec::new();
    for ((to, number), send) in calls.iter().zip(sends) {
        step(&format!("enqueues the send of message {number} to rank {to}"));
        kept.push(send.wait().unwrap());
    }
    let mut arrived = Vec::new();
    for ((from, number), receive) in calls.iter().zip(receives) {
        step(&format!("enqueues the receive of message {number} of rank {from}"));
        arrived.push(receive.wait().unwrap());
    }
    for ((from, number), (vector, done)) in calls.iter().zip(&arrived) {
        step(&format!("waits for message {number} of rank {from} on the GPU"));
        done.wait();
        let want = vec![value(*from, me, *number); len];
        assert!(vector.read(&stream) == want, "message {number} of rank {from}, {len} elements");
    }
    step("waits for its sends on the GPU");
    kept.iter().for_each(|(_, done)| done.wait());
    step("waits for the others");
    // Freeing waits for the kernels of all ranks.
    world.barrier().unwrap();
}

#[test]
fn messages_in_both_directions_at_once() {
    let Some(gpu) = gpu("messages_in_both_directions_at_once") else { return };
    for ranks in [2, 4] {
        on_threads(ranks, |world| {
            let device = open(&world, &gpu, DeviceEngine::Shared);
            for len in LENGTHS {
                all_pairs(&world, &gpu, &device, (len, 4), |_| {});
            }
        });
    }
}

#[test]
fn messages_of_nccl_between_all_pairs() {
    let test = "messages_of_nccl_between_all_pairs";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    for ranks in 2..=4 {
        on_threads(ranks, |world| {
            let me = world.rank();
            let step = |what: &str| deadline.step(me, format!("{ranks} ranks: {what}"));
            step("connects");
            let Some(device) = connect_nccl(&world, &gpu, MessagePeers::All) else { return };
            for (in_flight, len) in [1, 4].into_iter().flat_map(|n| LENGTHS.map(|len| (n, len))) {
                let step = |what: &str| step(&format!("{in_flight} each, {len} elements: {what}"));
                all_pairs(&world, &gpu, &device, (len, in_flight), step);
            }
            step("ends");
            println!("nccl: rank {me} of {ranks} has exchanged messages with all others");
        });
    }
}

/// Messages and collectives of one group do not wait for each other: rank 0 starts a message before an all-reduce that
/// rank 1 enters before it receives.
#[test]
fn messages_of_nccl_do_not_wait_for_collectives() {
    let test = "messages_of_nccl_do_not_wait_for_collectives";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    on_threads(2, |world| {
        let (me, len) = (world.rank(), 1_000_000);
        deadline.step(me, "connects");
        let Some(device) = connect_nccl(&world, &gpu, MessagePeers::Neighbors) else { return };
        let stream = Stream::new(gpu.context.clone());
        let mut message = DeviceVec::new(&gpu, &stream, 0, &vec![me as f32; len]);
        let sum = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; len]);
        // The first collective connects the ranks, which allocates memory.
        prepared(&world, &stream);
        device.all_reduce(&stream, sum.slice(), sum.slice(), Op::Max).unwrap();
        for round in 0..10 {
            deadline.step(me, format!("round {round}"));
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
        deadline.step(me, "reads the results");
        assert_eq!(message.read(&stream), vec![0.0; len]);
        assert_eq!(sum.read(&stream), vec![1.0; len]);
        world.barrier().unwrap();
    });
}

/// A rank fails and frees its memory at once, which waits for the kernel of the other until that is aborted.
#[test]
fn failed_messages_of_nccl_are_reported() {
    let test = "failed_messages_of_nccl_are_reported";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, LIMIT);
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    for case in ["mismatched lengths", "never received"] {
        on_threads_with(&options, 2, |world| {
            let me = world.rank();
            let step = |what: &str| deadline.step(me, format!("{case}: {what}"));
            step("connects");
            let Some(device) = connect_nccl(&world, &gpu, MessagePeers::Neighbors) else { return };
            let stream = Stream::new(gpu.context.clone());
            let long = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 4_000_000]);
            let short = DeviceVec::new(&gpu, &stream, 0, &vec![1.0f32; 3_000_000]);
            prepared(&world, &stream);
            let message = |vector: &DeviceVec<f32>| match me {
                0 => device.send(&stream, vector.slice(), 1),
                _ => device.receive(&stream, vector.slice(), 0),
            };
            step("sends the first message");
            message(&long).unwrap();
            prepared(&world, &stream);
            step("fails");
            let result = match (case, me) {
                ("never received", 1) => {
                    std::thread::sleep(Duration::from_secs(4));
                    return step("frees its memory");
                }
                ("mismatched lengths", 1) => message(&short),
                _ => message(&long),
            };
            step("waits for the abort");
            // The stream goes on when the communicator is aborted.
            stream.synchronize();
            let error = result.and_then(|()| world.barrier()).unwrap_err();
            println!("nccl, {case}: {error}");
            let causes = [Cause::Disagreed, Cause::Late, Cause::Left];
            assert!(error.cause().is_some_and(|cause| causes.contains(&cause)), "{error}");
            step("frees its memory");
        });
    }
}

#[test]
fn messages_of_nccl_need_a_connection() {
    let test = "messages_of_nccl_need_a_connection";
    let Some(gpu) = gpu(test) else { return };
    let _deadline = Deadline::start(test, LIMIT);
    on_threads(4, |world| {
        let Some(device) = connect_nccl(&world, &gpu, MessagePeers::Neighbors) else { return };
        let me = world.rank();
        let connected: Vec<bool> = (0..4).map(|peer| device.has_messages(peer)).collect();
        assert_eq!(connected, (0..4).map(|peer| (peer + me) % 2 == 1).collect::<Vec<_>>());
        let stream = Stream::new(gpu.context.clone());
        let message = DeviceVec::new(&gpu, &stream, 0, &[1.0f32]);
        let error = device.send(&stream, message.slice(), (me + 2) % 4).unwrap_err().to_string();
        assert!(error.contains("are not connected for messages; call connect first"), "{error}");
        prepared(&world, &stream);
    });
}
