// A launch, as the driver hands it to `lanes.cpp`.

#pragma once
#include "lanes.h"

namespace emulated {

struct Launch {
    const char* name;
    const Kernel* kernel;
    const char* arguments;
    Index blocks, threads;
    std::size_t shared_bytes;
};

// Runs all blocks, one after the other.
void run_grid(const Launch& launch);

} // namespace emulated
