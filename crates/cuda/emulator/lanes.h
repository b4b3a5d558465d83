// What a kernel sees of the thread that runs it. Kernels and the driver share this file.

#pragma once
#include <cstddef>
#include <cstdint>

namespace emulated {

struct Index {
    unsigned x, y, z;
};

// A thread of a block.
struct Lane {
    Index thread, block, threads, blocks;
    char* dynamic_shared;
    // Copies to shared memory that were started: see `device.h`.
    void* copies;
    unsigned number; // in the block
    bool fenced; // has called __threadfence
    const char* stack;
    std::size_t stack_bytes;
};

// The thread that runs.
extern thread_local Lane* emulated_current __attribute__((tls_model("initial-exec")));

extern "C" {
// Waits for the threads of a block, or for `threads` of them at a barrier of its own.
void emulated_barrier(int id, int threads);
// Gives all lanes of a warp the operands of all lanes: 32 runs of `bytes` bytes, up to 64. Blocks until all have come.
const char* emulated_exchange(const void* operand, int bytes);
// What Hopper has, see the functions of `hopper.cuh` in `device.h`. An arrival without `bytes` expects none.
void emulated_init_mbarrier(void* barrier, unsigned arrivals);
void emulated_arrive(void* barrier, unsigned bytes);
void emulated_wait_mbarrier(void* barrier, unsigned parity);
void emulated_load_box(void* shared, const void* map, void* barrier, int x, int y, int z);
void emulated_warpgroup_fence();
void emulated_multiply_add(float* sums, unsigned long long a, unsigned long long b, bool a_transposed, bool b_transposed);
void emulated_commit_products();
void emulated_wait_products(int newest);
// Memory is read, or changed by an atomic operation, in code that is compiled without hooks.
void emulated_read(const void* address, int bytes);
void emulated_atomic(const void* address, int bytes);
// Ends the process with a message.
[[noreturn]] void emulated_fail(const char* message);
}

// A kernel, as the driver finds it in a compiled source.
struct Kernel {
    // Bytes of all arguments.
    std::size_t bytes;
    // Copies the arguments of a launch.
    void (*pack)(void** arguments, char* to);
    // Runs one thread.
    void (*run)(const char* arguments);
};

} // namespace emulated
