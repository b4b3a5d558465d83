// What a Hopper GPU does without its threads: the copy engine, which reads boxes of tensors, and products of warpgroups, whose
// operands are in shared memory. `lanes.cpp` knows when they happen.

#include "hopper.h"
#include "run.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

namespace emulated {

// With the 128-byte swizzle, the row of 128 bytes in its piece of 1024 changes which 16 bytes of the row are meant.
static std::size_t swizzle(std::size_t address) { return address ^ (address >> 7 & 7) << 4; }

// ---- tensor maps ----

// A tensor as `cuTensorMapEncodeTiled` writes it here. The innermost dimension comes first.
struct Map {
    std::uint64_t mark;
    std::uint64_t address;
    std::uint64_t dims[5];
    std::uint64_t strides[4]; // in bytes, of the second dimension and further
    std::uint16_t box[5];
    std::uint8_t rank, swizzled;
    char unused[28];
};
static_assert(sizeof(Map) == 128);

constexpr std::uint64_t MARK = 0x70616d20726f736e;
constexpr std::size_t ELEMENT = 2; // bytes of bf16

extern "C" int cuTensorMapEncodeTiled(void* to, int type, std::uint32_t rank, void* address, const std::uint64_t* dims,
                                      const std::uint64_t* strides, const std::uint32_t* box, const std::uint32_t* steps,
                                      int interleave, int swizzle, int promotion, int fill) {
    constexpr int INVALID_VALUE = 1, BF16 = 9, NO_SWIZZLE = 0, SWIZZLE_128 = 3;
    if (!to || !address || !dims || !strides || !box || !steps) return INVALID_VALUE;
    if (reinterpret_cast<std::uintptr_t>(to) % 64 || reinterpret_cast<std::uintptr_t>(address) % 16) return INVALID_VALUE;
    if (type != BF16 || rank < 3 || rank > 5 || interleave != 0 || fill != 0) return INVALID_VALUE;
    if ((swizzle != NO_SWIZZLE && swizzle != SWIZZLE_128) || promotion < 0 || promotion > 3) return INVALID_VALUE;
    const std::size_t row = box[0] * ELEMENT;
    if (row % 16 || (swizzle == SWIZZLE_128 && row > 128)) return INVALID_VALUE;
    Map map = {};
    map.mark = MARK;
    map.address = reinterpret_cast<std::uint64_t>(address);
    map.rank = static_cast<std::uint8_t>(rank);
    map.swizzled = swizzle == SWIZZLE_128;
    for (std::uint32_t i = 0; i < rank; i++) {
        if (dims[i] < 1 || dims[i] > std::uint64_t(1) << 32 || box[i] < 1 || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        map.dims[i] = dims[i];
        map.box[i] = static_cast<std::uint16_t>(box[i]);
    }
    for (std::uint32_t i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16 || strides[i] >= std::uint64_t(1) << 40) return INVALID_VALUE;
        map.strides[i] = strides[i];
    }
    std::memcpy(to, &map, sizeof map);
    return 0;
}

Box read_box(void* to, const void* from, const int (&at)[3], const std::function<void(const void*, std::size_t)>& read) {
    Map map;
    std::memcpy(&map, from, sizeof map);
    if (map.mark != MARK || map.rank != 3) fail_launch("load_box gets something else than the map of a tensor with three dimensions");
    if (reinterpret_cast<std::uintptr_t>(to) % 128) fail_launch("load_box copies to an address that is not a multiple of 128");
    if (at[0] * static_cast<std::int64_t>(ELEMENT) % 16) fail_launch("the place of a box in its row is not a multiple of 16 bytes");
    const std::int64_t row = map.box[0], dim = static_cast<std::int64_t>(map.dims[0]);
    // The part of each row that is in the tensor. What is outside is zero.
    const std::int64_t first = std::clamp<std::int64_t>(at[0], 0, dim), end = std::clamp<std::int64_t>(at[0] + row, 0, dim);
    Box box = {static_cast<char*>(to), map.swizzled != 0, std::vector<char>(row * map.box[1] * map.box[2] * ELEMENT), 0};
    char* next = box.bytes.data();
    for (std::int64_t z = at[2]; z < std::int64_t(at[2]) + map.box[2]; z++) {
        for (std::int64_t y = at[1]; y < std::int64_t(at[1]) + map.box[1]; y++, next += row * ELEMENT) {
            const bool outside = y < 0 || z < 0 || y >= static_cast<std::int64_t>(map.dims[1]) || z >= static_cast<std::int64_t>(map.dims[2]);
            if (outside || first >= end) continue;
            const char* source = reinterpret_cast<const char*>(map.address) + first * ELEMENT + y * map.strides[0] + z * map.strides[1];
            const std::size_t bytes = (end - first) * ELEMENT;
            read(source, bytes);
            std::memcpy(next + (first - at[0]) * ELEMENT, source, bytes);
        }
    }
    // Until the bytes arrive, the target is not a number.
    std::memset(to, 0xff, box.bytes.size());
    return box;
}

void write_box(const Box& box) {
    if (!box.swizzled) {
        std::memcpy(box.to, box.bytes.data(), box.bytes.size());
        return;
    }
    const auto to = reinterpret_cast<std::size_t>(box.to);
    for (std::size_t i = 0; i < box.bytes.size(); i += 16)
        std::memcpy(reinterpret_cast<char*>(swizzle(to + i)), box.bytes.data() + i, 16);
}

// ---- products ----

constexpr int ROWS = 64, COLUMNS = 256, K = 16;
// Products of the same sums that are multiplied together.
constexpr int BATCH = 4;

// A matrix (OUTER, K) in shared memory, by its descriptor.
template <int OUTER> struct Operand {
    std::size_t start, leading, stride;
    bool transposed;

    Operand(std::uint64_t descriptor, bool transposed) : transposed(transposed) {
        const auto field = [&](int bit) { return (descriptor >> bit & 0x3fff) << 4; };
        start = field(0), leading = field(16), stride = field(32);
    }

    // Elements are stored in chunks of 8, along the inner or, transposed, along the outer dimension.
    std::size_t chunk(int outer, int k) const {
        if (transposed) return swizzle(start + outer / 64 * leading + k / 8 * stride + k % 8 * 128 + 2 * (outer % 64));
        return swizzle(start + outer / 8 * stride + outer % 8 * 128 + 2 * k);
    }

    template <class Visit> void visit(int first, int end, const Visit& visit) const {
        for (int outer = first; outer < end; outer += transposed ? 8 : 1)
            for (int k = 0; k < K; k += transposed ? 1 : 8) visit(outer, k, chunk(outer, k));
    }

    std::size_t end() const {
        std::size_t end = 0;
        visit(0, OUTER, [&](int, int, std::size_t at) { end = std::max(end, at + 16); });
        return end;
    }

    // (K, OUTER)
    void decode(const char* shared, float* to) const {
        visit(0, OUTER, [&](int outer, int k, std::size_t at) {
            std::uint16_t bits[8];
            std::memcpy(bits, shared + at, sizeof bits);
            std::uint32_t wide[8];
            for (int i = 0; i < 8; i++) wide[i] = std::uint32_t(bits[i]) << 16;
            float* first = to + k * OUTER + outer;
            if (transposed) {
                std::memcpy(first, wide, sizeof wide);
            } else {
                for (int i = 0; i < 8; i++) std::memcpy(first + i * OUTER, &wide[i], 4);
            }
        });
    }
};

static Operand<ROWS> a_of(const Product& product) { return {product.a, product.a_transposed}; }
static Operand<COLUMNS> b_of(const Product& product) { return {product.b, product.b_transposed}; }

bool is_outside(const Product& product, std::size_t shared_bytes) {
    constexpr std::uint64_t SWIZZLED = 1;
    if (product.a >> 62 != SWIZZLED || product.b >> 62 != SWIZZLED) return true;
    return a_of(product).end() > shared_bytes || b_of(product).end() > shared_bytes;
}

void visit_operands(const Product& product, const char* shared, int warp, const std::function<void(const char*)>& visit) {
    const auto visit_chunk = [&](int, int, std::size_t at) { visit(shared + at); };
    a_of(product).visit(warp * ROWS / 4, (warp + 1) * ROWS / 4, visit_chunk);
    b_of(product).visit(warp * COLUMNS / 4, (warp + 1) * COLUMNS / 4, visit_chunk);
}

struct Matrices {
    alignas(64) float a[BATCH * K][ROWS];
    alignas(64) float b[BATCH * K][COLUMNS];
    alignas(64) float sums[ROWS][COLUMNS];
};

// sums += aᵀ · b over `depth` rows
static void multiply_matrices(Matrices& matrices, int depth) {
    typedef float Vector __attribute__((vector_size(64)));
    constexpr int HIGH = 4, WIDE = 4, LANES = 16;
    for (int row = 0; row < ROWS; row += HIGH) {
        for (int column = 0; column < COLUMNS; column += WIDE * LANES) {
            Vector part[HIGH][WIDE];
            for (int i = 0; i < HIGH; i++)
                for (int j = 0; j < WIDE; j++) part[i][j] = *reinterpret_cast<const Vector*>(&matrices.sums[row + i][column + j * LANES]);
            for (int k = 0; k < depth; k++) {
                for (int j = 0; j < WIDE; j++) {
                    const Vector b = *reinterpret_cast<const Vector*>(&matrices.b[k][column + j * LANES]);
                    for (int i = 0; i < HIGH; i++) part[i][j] += matrices.a[k][row + i] * b;
                }
            }
            for (int i = 0; i < HIGH; i++)
                for (int j = 0; j < WIDE; j++) *reinterpret_cast<Vector*>(&matrices.sums[row + i][column + j * LANES]) = part[i][j];
        }
    }
}

// Calls `visit` for each pair of neighbors that a thread of the warpgroup has.
template <class Visit> static void fragments(float* const* sums, Matrices& matrices, const Visit& visit) {
    for (int thread = 0; thread < 128; thread++) {
        const int lane = thread % 32, row = 16 * (thread / 32) + lane / 4, column = 2 * (lane % 4);
        float* own = sums[thread];
        for (int j = 0; j < COLUMNS / 8; j++) {
            visit(own + 4 * j, &matrices.sums[row][8 * j + column]);
            visit(own + 4 * j + 2, &matrices.sums[row + 8][8 * j + column]);
        }
    }
}

void multiply(float* const* sums, const Product* products, std::size_t count, const char* shared) {
    static thread_local auto matrices = std::make_unique<Matrices>();
    fragments(sums, *matrices, [](const float* own, float* all) { std::memcpy(all, own, 8); });
    for (std::size_t first = 0; first < count; first += BATCH) {
        const auto batch = static_cast<int>(std::min<std::size_t>(BATCH, count - first));
        for (int i = 0; i < batch; i++) {
            a_of(products[first + i]).decode(shared, matrices->a[i * K]);
            b_of(products[first + i]).decode(shared, matrices->b[i * K]);
        }
        multiply_matrices(*matrices, batch * K);
    }
    fragments(sums, *matrices, [](float* own, const float* all) { std::memcpy(own, all, 8); });
}

} // namespace emulated
