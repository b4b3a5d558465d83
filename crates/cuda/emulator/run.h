// A launch, as the driver hands it to `lanes.cpp`.

#pragma once
#include "lanes.h"

#include <string>

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

// Ends the process with a message that names the kernel.
[[noreturn]] void fail_launch(const std::string& message);

} // namespace emulated
