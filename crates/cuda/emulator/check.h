// What the emulation tells the checker (`check.cpp`). Every call is on the thread of the host that runs the kernel.

#pragma once
#include "hopper.h"
#include "run.h"
#include "stream.h"

namespace emulated {

// LOCKSTEP_EMULATED_CHECK is set.
bool checking();

// ---- the order of accesses ----

void check_launch(const Launch& launch);
// A block starts, with new shared memory.
void check_block(unsigned number, const char* shared, std::size_t bytes);
// These warps have met: what one did before, all may use afterwards.
void check_meeting(unsigned warps);

// ---- accesses in code without hooks ----

enum Kind : std::uint8_t { READ = 0, WRITE = 1, ATOMIC = 2 };

// `place`: in the kernel's code.
void check_access(const void* address, unsigned bytes, Kind kind, const void* place);

// ---- mbarriers ----

// Warps of a block, the copy engine, and the products of each warp access memory independently of each other.
constexpr unsigned WARPS = 32, COPIES = WARPS, PRODUCTS = WARPS + 1, AGENTS = PRODUCTS + WARPS;

// What those knew that have arrived at an mbarrier: until now, and until its last phase was complete.
struct Order {
    std::uint32_t arriving[AGENTS] = {}, complete[AGENTS] = {};
};
// The running thread arrives.
void check_arrival(Order& order);
// A phase is complete.
void check_phase(Order& order);
// The running thread has waited for a phase.
void check_wait(const Order& order);

// ---- copies and products ----

// A copy that the running thread starts reads this memory of the device. It may be memory that was never written.
void check_box_reads(const void* from, std::size_t bytes, const void* place);
// A copy starts to write. Returns the clock that `check_box_arrives` needs.
std::uint32_t check_box_starts(const void* to, std::size_t bytes, const void* place);
void check_box_arrives(Order& order, std::uint32_t clock, const void* to, std::size_t bytes);
// The running warp starts its part of a product. Returns the clock that `check_product_ends` needs.
std::uint32_t check_product_starts(const Product& product, const char* shared, const void* place);
// All warps of a warpgroup have waited for the part of one of them.
void check_product_ends(unsigned warp, std::uint32_t clock);

// ---- memory of the device ----

// The part of the device's memory that an address is in.
bool find_device_memory(std::uint64_t address, std::uint64_t& from, std::uint64_t& to);
// New memory, which nobody has written.
void check_new(std::uint64_t address, std::size_t bytes);

} // namespace emulated
