//! Started calls: many in flight, mixed with blocking calls, messages in both directions, and progress
//! without help of the thread that started them.

use crate::processes::{hosts, on_processes, shared_memory, tcp};
use lockstep_comm::{Group, Op, Pending, on_threads};
use std::time::{Duration, Instant};

/// More elements than any link buffers.
const LARGE: usize = 1 << 19;

fn wait_in_reverse_order(world: &Group) {
    let n = world.size() as i32;
    let started: Vec<Pending<_>> = (0..100)
        .map(|i| {
            world.start_all_reduce(vec![i + world.rank() as i32; 1 + 97 * i as usize], Op::Sum)
        })
        .collect();
    for (i, pending) in started.into_iter().enumerate().rev() {
        let sums = pending.wait().unwrap();
        assert_eq!(sums, vec![n * i as i32 + n * (n - 1) / 2; 1 + 97 * i]);
    }
}

/// Started and blocking calls are executed in the order in which they were made.
fn mixed_with_blocking_calls(world: &Group) {
    let n = world.size() as i64;
    let mut pending = Vec::new();
    for i in 0..30i64 {
        pending.push((i, world.start_all_reduce(vec![i; 5000], Op::Sum)));
        let mut now = vec![i; 100];
        world.all_reduce(&mut now, Op::Sum).unwrap();
        assert_eq!(now, vec![n * i; 100]);
        if i % 3 == 0 {
            pending.push((1, world.start_broadcast(vec![n; 5000], i as usize % world.size())));
            world.barrier().unwrap();
        }
    }
    for (i, started) in pending {
        assert_eq!(started.wait().unwrap(), vec![n * i; 5000]);
    }
}

/// All ranks send to all ranks, including themselves, before any of them receives.
fn messages_in_both_directions(world: &Group) {
    let (me, n) = (world.rank(), world.size());
    let sent: Vec<Pending<_>> =
        (0..n).map(|to| world.start_send(vec![(me * n + to) as i32; LARGE], to)).collect();
    let received: Vec<Pending<_>> =
        (0..n).rev().map(|from| world.start_receive(vec![0i32; LARGE], from)).collect();
    // Concurrently a collective, and a second message that queues behind the first.
    let second = world.start_send(vec![7u8], (me + 1) % n);
    let mut sum = vec![1f32; 10_000];
    world.all_reduce(&mut sum, Op::Sum).unwrap();
    assert!(sum.iter().all(|x| *x == n as f32));
    for (from, pending) in (0..n).rev().zip(received) {
        let got = pending.wait().unwrap();
        assert!(got.iter().all(|x| *x == (from * n + me) as i32), "from {from}");
    }
    let mut small = [0u8];
    world.receive(&mut small, (me + n - 1) % n).unwrap();
    assert_eq!(small, [7]);
    second.wait().unwrap();
    for pending in sent {
        assert_eq!(pending.wait().unwrap().len(), LARGE);
    }
}

/// Every rank starts an all-reduce and then only polls.
fn progress_without_waiting(world: &Group) {
    let pending = world.start_all_reduce(vec![1f32; LARGE], Op::Sum);
    let until = Instant::now() + Duration::from_secs(120);
    while !pending.is_done() {
        assert!(Instant::now() < until, "no progress in the background");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(pending.wait().unwrap().iter().all(|x| *x == world.size() as f32));
}

fn all(world: &Group) {
    wait_in_reverse_order(world);
    mixed_with_blocking_calls(world);
    messages_in_both_directions(world);
    progress_without_waiting(world);
}

#[test]
fn started_on_threads() {
    for ranks in 1..=4 {
        on_threads(ranks, |world| all(&world));
    }
}

#[test]
fn started_on_processes() {
    for (world, topology) in [("shared", shared_memory(3)), ("tcp", tcp(3)), ("hosts", hosts(2, 2))]
    {
        on_processes("started::started_on_processes", world, topology, |world| all(&world));
    }
}

/// An invalid argument is returned by `wait`, and later calls are executed.
#[test]
fn an_invalid_argument_is_returned_by_wait() {
    on_threads(2, |world| {
        let wrong = world.start_reduce(vec![1f32; 4], Op::Sum, 9);
        let right = world.start_all_reduce(vec![1f32; 4], Op::Sum);
        assert!(wrong.wait().unwrap_err().to_string().contains("root 9"));
        assert_eq!(right.wait().unwrap(), [2.0; 4]);
        assert!(world.start_send(vec![1u8], 2).wait().is_err());
        assert!(world.start_receive(vec![1u8], 2).wait().is_err());
    });
}
