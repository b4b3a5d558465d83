//! Addresses of tensors in the memory that a device takes from the driver.

use lockstep_kernels::{Device, DeviceType, Dtype, Tag, Tensor};

#[test]
fn no_tensor_spans_separate_chunks() {
    const MIB: usize = 1 << 20;
    let device = Device::from_env(1);
    if device.device_type() == DeviceType::Cpu {
        return println!("no_tensor_spans_separate_chunks: skipped: it needs a GPU");
    }
    let tensor = |mib: usize| device.empty(mib, MIB / 4, Dtype::F32, Tag::Buffers);
    let range = |tensor: &Tensor| {
        let start = tensor.view().address();
        start..start + (tensor.len() * 4) as u64
    };
    device.separate_chunks(320 * MIB);
    let first = tensor(200);
    assert_eq!(device.memory().reserved, 320 * MIB);
    let start = range(&first).start;
    // Does not fit behind the first, and may not begin there.
    let second = tensor(150);
    assert_eq!(range(&second).start, start + 320 * MIB as u64);
    assert_eq!(device.memory().reserved, (320 + 256) * MIB);
    let small = tensor(110);
    assert_eq!(range(&small), range(&first).end..range(&first).end + 110 * MIB as u64);
    drop((first, second, small));
    // Free memory of two chunks is not joined.
    let large = tensor(400);
    assert_eq!(range(&large).start, start + 576 * MIB as u64);
    let again = tensor(250);
    assert_eq!(range(&again).start, start + 320 * MIB as u64);
    // Another device of the same GPU, for communication, does the same.
    let background = device.background();
    let other = background.empty(1, 1, Dtype::F32, Tag::Buffers);
    assert_eq!(background.memory().reserved, 256 * MIB);
    drop(other);
}
