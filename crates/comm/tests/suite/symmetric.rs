//! Symmetric buffers: whole, in slices, mixed with ordinary memory, dropped and recreated. Results equal
//! those of ordinary buffers, and in-place collectives send nothing.

use crate::processes::{hosts, on_processes, shared_memory, tcp};
use crate::reference::{combined, inputs};
use lockstep_comm::{Group, Op, Symmetric, on_threads, shard_range};

const LEN: usize = 20_000;

fn filled(buffer: &mut [f32], world: &Group) {
    buffer.copy_from_slice(&inputs::<f32>(world.rank(), buffer.len(), Op::Sum));
}

fn whole_and_in_slices(world: &Group) {
    let (me, n) = (world.rank(), world.size());
    let sums = combined::<f32>(n, LEN, Op::Sum);
    let mut buffer: Symmetric<f32> = world.symmetric(3 * LEN).unwrap();
    assert!(buffer.iter().all(|x| *x == 0.0));

    let before = world.traffic();
    // The same offset on all ranks, then a different one on each.
    for offset in [0, LEN + 13, (me * 1001) % LEN] {
        let slice = &mut buffer[offset..offset + LEN];
        filled(slice, world);
        world.all_reduce(slice, Op::Sum).unwrap();
        assert_eq!(slice, sums);
    }
    let one_host = world.hosts().iter().all(|h| *h == 0);
    if one_host {
        assert_eq!(world.traffic(), before, "in-place calls send nothing");
    }

    // Input and output in one allocation.
    let own = shard_range(LEN, n, me);
    let (input, rest) = buffer.split_at_mut(LEN);
    filled(input, world);
    world.reduce_scatter(input, &mut rest[..own.len()], Op::Sum).unwrap();
    assert_eq!(rest[..own.len()], sums[own.clone()]);
    let (part, all) = rest.split_at_mut(LEN);
    world.all_gather(&part[..own.len()], all).unwrap();
    assert_eq!(all, sums);
    all.fill(me as f32);
    world.broadcast(all, n - 1).unwrap();
    assert!(all.iter().all(|x| *x == (n - 1) as f32));
    let each = LEN / n * n;
    input.fill(me as f32);
    world.all_to_all(&input[..each], &mut part[..each]).unwrap();
    assert!(part[..each].iter().enumerate().all(|(i, x)| *x == (i / (each / n)) as f32));
}

/// If one rank passes an ordinary buffer, all ranks use another access method.
fn mixed_with_ordinary_memory(world: &Group) {
    let sums = combined::<f32>(world.size(), LEN, Op::Sum);
    for ordinary_rank in 0..world.size() {
        let mut symmetric: Symmetric<f32> = world.symmetric(LEN).unwrap();
        let mut ordinary = vec![0f32; LEN];
        let here = world.rank() == ordinary_rank;
        let buffer = if here { &mut ordinary[..] } else { &mut symmetric[..] };
        filled(buffer, world);
        world.all_reduce(buffer, Op::Sum).unwrap();
        assert_eq!(buffer, sums);
        filled(buffer, world);
        world.reduce(buffer, Op::Sum, 0).unwrap();
        if world.rank() == 0 {
            assert_eq!(buffer, sums);
        } else {
            assert_eq!(buffer, inputs::<f32>(world.rank(), LEN, Op::Sum));
        }
    }
    // Different allocations on different ranks.
    let mut two = [world.symmetric::<f32>(LEN).unwrap(), world.symmetric::<f32>(LEN).unwrap()];
    let buffer = &mut two[world.rank() % 2];
    filled(buffer, world);
    world.all_reduce(buffer, Op::Sum).unwrap();
    assert_eq!(buffer[..], sums);
}

fn dropped_and_recreated(world: &Group) {
    let n = world.size() as f32;
    for i in 0..20 {
        let mut buffer: Symmetric<f32> = world.symmetric(LEN + i).unwrap();
        assert!(buffer.iter().all(|x| *x == 0.0), "new memory is zero");
        buffer.fill(1.0);
        // Moved into a started call and back.
        let mut buffer = world.start_all_reduce(buffer, Op::Sum).wait().unwrap();
        assert!(buffer.iter().all(|x| *x == n));
        if i % 4 == world.rank() % 4 {
            drop(buffer);
            // The other ranks still have symmetric buffers; ours is ordinary memory.
            let mut plain = vec![2f32; LEN + i];
            world.all_reduce(&mut plain, Op::Sum).unwrap();
            assert!(plain.iter().all(|x| *x == 2.0 * n));
        } else {
            buffer.fill(2.0);
            world.all_reduce(&mut buffer, Op::Sum).unwrap();
            assert!(buffer.iter().all(|x| *x == 2.0 * n));
        }
    }
    assert_eq!(world.symmetric::<f32>(0).unwrap().len(), 0);
}

/// A buffer of the world, which is ordinary memory for a subgroup, and one of the subgroup.
fn in_a_group(world: &Group) {
    let group = world.split(Some(world.rank() as i64 % 2), 0, "half").unwrap().unwrap();
    let sums = combined::<f32>(group.size(), LEN, Op::Sum);
    let mut of_world: Symmetric<f32> = world.symmetric(LEN).unwrap();
    let mut of_group: Symmetric<f32> = group.symmetric(LEN).unwrap();
    for buffer in [&mut of_world, &mut of_group] {
        filled(buffer, &group);
        group.all_reduce(buffer, Op::Sum).unwrap();
        assert_eq!(buffer[..], sums);
    }
}

fn all(world: &Group) {
    whole_and_in_slices(world);
    mixed_with_ordinary_memory(world);
    dropped_and_recreated(world);
    in_a_group(world);
}

#[test]
fn symmetric_on_threads() {
    for ranks in 1..=4 {
        on_threads(ranks, |world| all(&world));
    }
}

#[test]
fn symmetric_on_processes() {
    for (world, topology) in [("shared", shared_memory(4)), ("tcp", tcp(2)), ("hosts", hosts(2, 2))]
    {
        on_processes("symmetric::symmetric_on_processes", world, topology, |world| all(&world));
    }
}
