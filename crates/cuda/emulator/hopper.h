// Boxes of tensors and products of warpgroups, which the threads of a Hopper GPU start and wait for.

#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace emulated {

// ---- copies ----

// A box of a tensor on its way to shared memory.
struct Box {
    char* to;
    bool swizzled;
    std::vector<char> bytes;
    std::uint32_t clock; // for the checker
};

// Reads a box at elements (x, y, z) of a tensor; `read` is told which bytes of the device's memory it takes.
Box read_box(void* to, const void* map, const int (&at)[3], const std::function<void(const void*, std::size_t)>& read);
// The bytes arrive in shared memory.
void write_box(const Box& box);

// ---- products ----

// Operands as `matrix_descriptor` describes them.
struct Product {
    float* sums; // 128 of a thread
    std::uint64_t a, b;
    bool a_transposed, b_transposed;
    std::uint32_t clock; // for the checker

    bool same_operands(const Product& other) const {
        return a == other.a && b == other.b && a_transposed == other.a_transposed && b_transposed == other.b_transposed;
    }
};

// The operands of a product are outside of shared memory.
bool is_outside(const Product& product, std::size_t shared_bytes);
// Calls `visit` for every 16 bytes that a warp reads of the operands: its rows of `a`, and its share of `b`.
void visit_operands(const Product& product, const char* shared, int warp, const std::function<void(const char*)>& visit);
// `sums` of the 128 threads of a warpgroup += the products, one after the other.
void multiply(float* const* sums, const Product* products, std::size_t count, const char* shared);

} // namespace emulated
