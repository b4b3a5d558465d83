// How other libraries of the emulated GPU put work on a stream.

#pragma once
#include <cstddef>

extern "C" {
// Runs `run(state)` after all that is on the stream. `drop` frees the state. Graphs may run it several times.
void emulated_enqueue(void* stream, void (*run)(void*), void (*drop)(void*), void* state);
// `bytes` at this address of the device are written.
void emulated_written(const void* address, std::size_t bytes);
}
