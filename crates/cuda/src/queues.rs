//! Hardware queues between a process and a GPU, to which the driver assigns the streams.

/// The variable with the number of queues that a process uses of a GPU. The driver reads it when it opens a GPU.
const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// As many as a GPU has.
const ALL: &str = "32";

/// Makes this process, and those that it starts, use all queues of a GPU. Without it the driver uses 8, and streams that share
/// a queue wait for each other, so a message of NCCL could be queued behind one that waits for it. A number in the
/// environment stays.
///
/// # Safety
/// It sets an environment variable, so no other thread may run.
pub unsafe fn use_all_queues() {
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: as the caller promises.
        unsafe { std::env::set_var(VARIABLE, ALL) };
    }
}
