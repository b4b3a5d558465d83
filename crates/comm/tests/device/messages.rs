//! Messages on device memory.

use crate::memory::DeviceVec;
use crate::{gpu, open};
use lockstep_comm::{DeviceEngine, on_threads};
use lockstep_cuda::Stream;

/// Every rank sends to the next and receives from the one before, from two threads.
#[test]
fn messages_travel_around_a_ring() {
    let Some(gpu) = gpu("messages_travel_around_a_ring") else { return };
    for ranks in [2, 3, 8] {
        on_threads(ranks, |world| {
            let device = open(&world, &gpu, DeviceEngine::Shared);
            let (me, next) = (world.rank(), (world.rank() + 1) % ranks);
            let before = (me + ranks - 1) % ranks;
            for len in [0usize, 1, 777, 300_000] {
                let out = Stream::new(gpu.context.clone());
                let own = vec![me as f32; len];
                let message = DeviceVec::new(&gpu, &out, 1, &own);
                let inc = Stream::new(gpu.context.clone());
                let arrived = DeviceVec::new(&gpu, &inc, 3, &vec![-1.0f32; len]);
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
                assert_eq!(arrived.read(&inc), vec![before as f32; len]);
                out.synchronize();
            }
        });
    }
}
