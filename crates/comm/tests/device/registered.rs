//! NCCL with registered buffers, between processes: buffers that were allocated, and others in a range of addresses that
//! grows.

use crate::check::check_lengths;
use crate::deadline::{Deadline, LIMIT};
use crate::processes::{on_processes, shared_memory};
use crate::{gpu, open_nccl_with};
use lockstep_comm::{
    DeviceEngine, DeviceGroup, DeviceOptions, DeviceSlice, Dtype, Op, World, bytes_of,
    bytes_of_mut, shard_range,
};
use lockstep_cuda::{Arena, Gpu, Stream};
use std::time::Duration;

const REGISTERED: DeviceOptions = DeviceOptions { engine: DeviceEngine::Nccl, register: true };

/// Bytes that are mapped at once, and elements of the buffers in them.
const MAPPED: usize = 64 << 20;
const LEN: usize = 13 << 20;

/// Needs NCCL 2.30 or newer and `NCCL_MULTI_RANK_GPU_ENABLE=1`.
#[test]
fn registered_buffers_give_the_same_results() {
    let test = "registered::registered_buffers_give_the_same_results";
    let Some(gpu) = gpu(test) else { return };
    let deadline = Deadline::start(test, Duration::from_secs(240));
    for ranks in [2, 4] {
        on_processes(test, &format!("{ranks}"), shared_memory(ranks), |world| {
            deadline.step(world.rank(), format!("{ranks} ranks"));
            let Some(device) = open_nccl_with(&world, &gpu, REGISTERED) else { return };
            assert!(device.registers());
            check_mapped(&world, &gpu, &device);
            // Buffers that are freed, and others at their addresses.
            check_lengths(&world, &gpu, REGISTERED, &[7, 4099, 70_000]);
            check_mapped(&world, &gpu, &device);
            println!("nccl, registered: rank {} of {ranks} is exact", world.rank());
        });
    }
}

/// Gathers, and then reduces, buffers in a range of addresses that grows.
fn check_mapped(world: &World, gpu: &Gpu, device: &DeviceGroup) {
    let (me, ranks, stream) = (world.rank(), world.size(), Stream::new(gpu.context.clone()));
    let mut arena = Arena::of(gpu.context.clone(), MAPPED).expect("memory");
    for turn in 0..3 {
        let at = |first: usize, len: usize| {
            let address = arena.start() + (turn * MAPPED + 4 * first) as u64;
            // SAFETY: the arena outlives the calls.
            unsafe { DeviceSlice::new(address, len, Dtype::F32) }
        };
        let own = shard_range(LEN, ranks, me);
        let values: Vec<f32> = own.clone().map(|i| value(i, turn)).collect();
        write(&stream, at(own.start, own.len()), &values);
        stream.synchronize();
        world.barrier().unwrap();
        device.all_gather(&stream, at(own.start, own.len()), at(0, LEN)).unwrap();
        device.all_reduce(&stream, at(0, LEN), at(0, LEN), Op::Sum).unwrap();
        let got = read(&stream, at(0, LEN));
        let wrong = (0..LEN).find(|i| got[*i] != ranks as f32 * value(*i, turn));
        assert_eq!(wrong, None, "turn {turn}, {ranks} ranks");
        world.barrier().unwrap();
        arena.grow(MAPPED).expect("memory");
    }
}

/// NCCL maps only one of the allocations to the other ranks.
#[test]
fn a_buffer_over_two_allocations_is_refused() {
    let test = "registered::a_buffer_over_two_allocations_is_refused";
    let Some(gpu) = gpu(test) else { return };
    let _deadline = Deadline::start(test, LIMIT);
    on_processes(test, "world", shared_memory(2), |world| {
        let Some(device) = open_nccl_with(&world, &gpu, REGISTERED) else { return };
        let stream = Stream::new(gpu.context.clone());
        let mut arena = Arena::of(gpu.context.clone(), MAPPED).expect("memory");
        arena.grow(MAPPED).expect("memory");
        // SAFETY: the arena outlives the call.
        let buffer = unsafe { DeviceSlice::new(arena.start(), MAPPED / 2, Dtype::F32) };
        let error = device.all_reduce(&stream, buffer, buffer, Op::Sum).unwrap_err().to_string();
        assert!(error.contains("spans two allocations of device memory"), "{error}");
    });
}

fn value(index: usize, turn: usize) -> f32 {
    ((index * 31 + turn) % 1009) as f32
}

fn write(stream: &Stream, to: DeviceSlice, values: &[f32]) {
    let (context, bytes) = (stream.context(), bytes_of(values));
    let (to, from, len) = (to.address(), bytes.as_ptr().cast(), bytes.len());
    // SAFETY: the memory has this size; pageable memory is read before the call returns.
    let status = unsafe { (context.api().cuMemcpyHtoDAsync_v2)(to, from, len, stream.handle()) };
    context.must(status, "write");
}

fn read(stream: &Stream, from: DeviceSlice) -> Vec<f32> {
    let mut values = vec![0.0f32; from.len()];
    let (context, bytes) = (stream.context(), bytes_of_mut(&mut values));
    let (to, len) = (bytes.as_mut_ptr().cast(), bytes.len());
    // SAFETY: the memory has this size; the vector is used after `synchronize`.
    let status =
        unsafe { (context.api().cuMemcpyDtoHAsync_v2)(to, from.address(), len, stream.handle()) };
    context.must(status, "read");
    stream.synchronize();
    values
}
