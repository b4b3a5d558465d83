//! Messages on device memory.

use crate::check::check_ring;
use crate::gpu;
use lockstep_comm::{DeviceEngine, on_threads};

#[test]
fn messages_travel_around_a_ring() {
    let Some(gpu) = gpu("messages_travel_around_a_ring") else { return };
    for ranks in [2, 3, 8] {
        on_threads(ranks, |world| check_ring(&world, &gpu, DeviceEngine::Shared));
    }
}
