// What the emulation tells the checker (`check.cpp`). Every call is on the thread of the host that runs the kernel.

#pragma once
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

// ---- memory of the device ----

// The part of the device's memory that an address is in.
bool find_device_memory(std::uint64_t address, std::uint64_t& from, std::uint64_t& to);
// New memory, which nobody has written.
void check_new(std::uint64_t address, std::size_t bytes);

} // namespace emulated
