// Kernels of one mistake each, and next to them how they are right.

#define KERNEL extern "C" __global__ void

// ---- shared memory ----

KERNEL warps_without_barrier(float* out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL warps_with_barrier(float* out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

// The last read of a round is not before the first write of the next.
KERNEL one_barrier_in_a_loop(float* out) {
    __shared__ float shared[64];
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        shared[threadIdx.x] = i;
        __syncthreads();
        sum += shared[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

KERNEL two_barriers_in_a_loop(float* out) {
    __shared__ float shared[64];
    float sum = 0.0f;
    for (int i = 0; i < 3; i++) {
        shared[threadIdx.x] = i;
        __syncthreads();
        sum += shared[63 - threadIdx.x];
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

KERNEL barrier_of_other_warps(float* out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    barrier(1 + threadIdx.x / 32, 32);
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL barrier_of_some_warps(float* out) {
    __shared__ float shared[128];
    const int group = threadIdx.x / 64, i = threadIdx.x % 64;
    shared[threadIdx.x] = i;
    barrier(1 + group, 64);
    if (i < 32) out[32 * group + i] = shared[64 * group + 63 - i];
}

KERNEL lanes_after_a_shuffle(float* out) {
    __shared__ float shared[32];
    shared[threadIdx.x] = threadIdx.x;
    const float x = __shfl_xor_sync(ALL_LANES, (float)threadIdx.x, 1);
    out[threadIdx.x] = shared[threadIdx.x ^ 1] + x;
}

KERNEL lanes_after_syncwarp(float* out) {
    __shared__ float shared[32];
    shared[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}

KERNEL neighbouring_bytes(float* out) {
    __shared__ unsigned char shared[64];
    shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL dynamic_without_barrier(float* out) {
    extern __shared__ float shared[];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL copies_without_barrier(float* out) {
    __shared__ float4 shared[64];
    copy_16_async(&shared[threadIdx.x], out + 4 * threadIdx.x);
    commit_copies();
    wait_copies<0>();
    out[threadIdx.x] = shared[63 - threadIdx.x].x;
}

KERNEL copies_with_barrier(float* out) {
    __shared__ float4 shared[64];
    copy_16_async(&shared[threadIdx.x], out + 4 * threadIdx.x);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x].x;
}

// ---- device memory ----

KERNEL blocks_write_one_number(float* out) {
    if (threadIdx.x == 0) out[0] = blockIdx.x;
}

KERNEL blocks_add_atomically(float* out) { atomicAdd(out, 1.0f); }

// The block that comes last reads what the others have written.
DEVICE void last_block_sums(float* out) {
    unsigned* arrived = (unsigned*)(out + 100);
    if (atomicAdd(arrived, 1u) != gridDim.x - 1) return;
    float sum = 0.0f;
    for (unsigned b = 0; b < gridDim.x; b++) sum += out[b];
    out[101] = sum;
}

KERNEL last_block_without_fence(float* out) {
    if (threadIdx.x > 0) return;
    out[blockIdx.x] = blockIdx.x;
    last_block_sums(out);
}

KERNEL last_block_with_fence(float* out) {
    if (threadIdx.x > 0) return;
    out[blockIdx.x] = blockIdx.x;
    __threadfence();
    last_block_sums(out);
}

// ---- memory that nobody has written ----

KERNEL half_of_shared_memory(float* out) {
    __shared__ float shared[64];
    if (threadIdx.x < 32) shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL half_of_dynamic_memory(float* out) {
    extern __shared__ float shared[];
    if (threadIdx.x < 32) shared[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

KERNEL reads_device_memory(float* out) { out[threadIdx.x + 64 * blockIdx.x] += 1.0f; }
