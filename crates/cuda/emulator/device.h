// CUDA C++ as the kernels use it, in terms of C++ for the host. `compiler.cpp` puts this in front of a source.

#pragma once
#include "lanes.h"

#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(BYTES) __attribute__((aligned(BYTES)))
#define __restrict__ __restrict

#define threadIdx (emulated::emulated_current->thread)
#define blockIdx (emulated::emulated_current->block)
#define blockDim (emulated::emulated_current->threads)
#define gridDim (emulated::emulated_current->blocks)

// ---- vectors ----

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- bits and numbers ----

template <class To, class From> inline To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> (4 * i) & 15, byte = both >> (8 * (nibble & 7)) & 255;
        result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return result;
}

template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> T;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}

// The number if one operand is a NaN, also a signaling one, for which the host's functions return NaN.
inline float emulated_fmax(float a, float b) { return a != a ? b : b != b ? a : a < b ? b : a; }
inline float emulated_fmin(float a, float b) { return a != a ? b : b != b ? a : b < a ? b : a; }
#define fmaxf emulated_fmax
#define fminf emulated_fmin

inline unsigned umin(unsigned a, unsigned b) { return min(a, b); }
inline unsigned umax(unsigned a, unsigned b) { return max(a, b); }

// ---- memory ----

template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T x) { *p = x; }
// In code that hooks do not see.
#ifdef EMULATED_CHECK
#define EMULATED_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#else
#define EMULATED_UNSEEN
#endif

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { emulated::emulated_fail("a kernel stopped with __trap()"); }

template <class T> EMULATED_UNSEEN inline T emulated_update(T* p, T x, T (*next)(T, T)) {
#ifdef EMULATED_CHECK
    emulated::emulated_atomic(p, sizeof *p);
#endif
    T old = *p;
    while (true) {
        T value = next(old, x);
        if (__atomic_compare_exchange(p, &old, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return old;
    }
}
template <class T> inline T atomicAdd(T* p, T x) {
    return emulated_update(p, x, +[](T a, T b) -> T { return a + b; });
}
template <class T> inline T atomicMax(T* p, T x) {
    return emulated_update(p, x, +[](T a, T b) -> T { return a < b ? b : a; });
}
template <class T> inline T atomicExch(T* p, T x) {
    return emulated_update(p, x, +[](T, T b) -> T { return b; });
}

// ---- threads that meet ----

inline void __syncthreads() { emulated::emulated_barrier(0, 0); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulated::emulated_exchange(nullptr, 0); }

// The operand of lane `from`; each lane of the warp brings its own.
template <class T> inline T emulated_shuffle(T x, int from) {
    static_assert(sizeof(T) <= 64);
    const char* all = emulated::emulated_exchange(&x, sizeof x);
    std::memcpy(&x, all + 64 * from, sizeof x);
    return x;
}
inline int emulated_lane_index() { return static_cast<int>(threadIdx.x % 32); }

template <class T> inline T __shfl_sync(unsigned, T x, int from) { return emulated_shuffle(x, from & 31); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
    return emulated_shuffle(x, emulated_lane_index() ^ mask);
}
template <class T> inline T __shfl_up_sync(unsigned, T x, unsigned by) {
    const int from = emulated_lane_index() - static_cast<int>(by);
    return emulated_shuffle(x, from < 0 ? emulated_lane_index() : from);
}
template <class T> inline T __shfl_down_sync(unsigned, T x, unsigned by) {
    const int from = emulated_lane_index() + static_cast<int>(by);
    return emulated_shuffle(x, from > 31 ? emulated_lane_index() : from);
}
template <class T> inline unsigned __match_any_sync(unsigned, T x) {
    const char* all = emulated::emulated_exchange(&x, sizeof x);
    unsigned equal = 0;
    for (int lane = 0; lane < 32; lane++) equal |= unsigned(!std::memcmp(all + 64 * lane, &x, sizeof x)) << lane;
    return equal;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const char* all = emulated::emulated_exchange(&x, sizeof x);
    for (int lane = 0; lane < 32; lane++) {
        unsigned other;
        std::memcpy(&other, all + 64 * lane, sizeof other);
        x = max(x, other);
    }
    return x;
}
inline unsigned __ballot_sync(unsigned, int x) {
    const unsigned one = x != 0;
    const char* all = emulated::emulated_exchange(&one, sizeof one);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++) votes |= unsigned(all[64 * lane] != 0) << lane;
    return votes;
}

// ---- the functions of ptx.cuh ----

inline void barrier(int id, int threads) { emulated::emulated_barrier(id, threads); }

inline unsigned emulated_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float emulated_from_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
inline unsigned pack_bf16(float low, float high) { return emulated_bf16(low) | emulated_bf16(high) << 16; }

inline float exp2_approximate(float x) {
    const float y = std::exp2(x);
    return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}

inline float f16_to_float(unsigned short bits) { return static_cast<float>(emulated_bits<_Float16>(bits)); }
inline unsigned short float_to_f16(float x) { return emulated_bits<unsigned short>(static_cast<_Float16>(x)); }

// A number with `mantissa` bits rounded to nearest, ties to even; beyond `largest` it is `largest`.
inline unsigned emulated_fp8(float x, int mantissa, int bias, float largest, unsigned nan) {
    const unsigned sign = __float_as_uint(x) >> 31 << 7;
    if (x != x) return nan;
    const double size = std::fmin(std::fabs(static_cast<double>(x)), static_cast<double>(largest));
    if (size == 0.0) return sign;
    const int exponent = std::max(std::ilogb(size), 1 - bias);
    const double unit = std::ldexp(1.0, exponent - mantissa);
    const auto units = static_cast<unsigned>(std::nearbyint(size / unit));
    // A carry into the exponent gives the next power of two.
    return sign | (units + (static_cast<unsigned>(exponent + bias - 1) << mantissa));
}
inline unsigned pack_e4m3(float a, float b, float c, float d) {
    const float all[4] = {a, b, c, d};
    unsigned packed = 0;
    for (int i = 0; i < 4; i++) packed |= emulated_fp8(all[i], 3, 7, 448.0f, 0x7f) << (8 * i);
    return packed;
}
inline unsigned pack_e5m2(float a, float b, float c, float d) {
    const float all[4] = {a, b, c, d};
    unsigned packed = 0;
    for (int i = 0; i < 4; i++) packed |= emulated_fp8(all[i], 2, 15, 57344.0f, 0x7f) << (8 * i);
    return packed;
}

// Copies arrive as late as the kernel allows. Until then, the target is not a number.
struct EmulatedCopies {
    struct Copy {
        void* to;
        char bytes[16];
    };
    std::vector<std::vector<Copy>> groups{1};
};
inline EmulatedCopies& emulated_copies() {
    void*& copies = emulated::emulated_current->copies;
    if (!copies) copies = new EmulatedCopies;
    return *static_cast<EmulatedCopies*>(copies);
}
inline void copy_16_async(void* shared, const void* global, int bytes = 16) {
    EmulatedCopies::Copy copy = {shared, {}};
#ifdef EMULATED_CHECK
    emulated::emulated_read(global, bytes);
#endif
    std::memcpy(copy.bytes, global, static_cast<std::size_t>(bytes));
    std::memset(shared, 0xff, 16);
    emulated_copies().groups.back().push_back(copy);
}
inline void commit_copies() { emulated_copies().groups.emplace_back(); }
template <int NEWEST> inline void wait_copies() {
    auto& groups = emulated_copies().groups;
    // The last group is not complete yet.
    while (groups.size() > NEWEST + 1) {
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.bytes, 16);
        groups.erase(groups.begin());
    }
}

// Row i of matrix m is at the address that lane 8 m + i gives. A lane gets elements 2 (lane % 4) + 0..2 of row lane / 4.
inline void emulated_matrices(unsigned (&to)[4], const void* row, bool transposed) {
    const char* all = emulated::emulated_exchange(&row, sizeof row);
    const int lane = emulated_lane_index();
    for (int m = 0; m < 4; m++) {
        unsigned halves[2];
        for (int i = 0; i < 2; i++) {
            const int r = transposed ? 2 * (lane % 4) + i : lane / 4, c = transposed ? lane / 4 : 2 * (lane % 4) + i;
            const unsigned short* from;
            std::memcpy(&from, all + 64 * (8 * m + r), sizeof from);
            halves[i] = from[c];
        }
        to[m] = halves[0] | halves[1] << 16;
    }
}
inline void load_matrices(unsigned (&to)[4], const void* row) { emulated_matrices(to, row, false); }
inline void load_transposed(unsigned (&to)[4], const void* row) { emulated_matrices(to, row, true); }

// c += a · b. Of a (16, 16) a lane has rows lane / 4 + 8 (i % 2) and columns 2 (lane % 4) + 8 (i / 2) + 0..2; of b (16, 8)
// rows 2 (lane % 4) + 8 i + 0..2 of column lane / 4; of c (16, 8) rows lane / 4 + 8 (i / 2), columns 2 (lane % 4) + i % 2.
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned own[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const char* all = emulated::emulated_exchange(own, sizeof own);
    auto operand = [&](int lane, int which, int half) {
        unsigned bits;
        std::memcpy(&bits, all + 64 * lane + 4 * which, sizeof bits);
        return emulated_from_bf16(half ? bits >> 16 : bits & 0xffff);
    };
    const int lane = emulated_lane_index();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; k++) {
            const float x = operand(row % 8 * 4 + k % 8 / 2, row / 8 + 2 * (k / 8), k % 2);
            const float y = operand(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
            sum += x * y;
        }
        c[i] = sum;
    }
}

// ---- the functions of hopper.cuh ----

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

inline void init_mbarrier(unsigned long long* barrier, unsigned arrivals) { emulated::emulated_init_mbarrier(barrier, arrivals); }
inline void publish_mbarriers() {}
inline void arrive(unsigned long long* barrier) { emulated::emulated_arrive(barrier, 0); }
inline void arrive_and_expect(unsigned long long* barrier, unsigned bytes) { emulated::emulated_arrive(barrier, bytes); }
inline void wait_mbarrier(unsigned long long* barrier, unsigned parity) { emulated::emulated_wait_mbarrier(barrier, parity); }
inline void load_box(void* shared, const TensorMap* map, unsigned long long* barrier, int x, int y, int z) {
    emulated::emulated_load_box(shared, map, barrier, x, y, z);
}
inline void fence_async_shared() {}

inline void warpgroup_fence() { emulated::emulated_warpgroup_fence(); }
inline void commit_products() { emulated::emulated_commit_products(); }
template <int NEWEST> inline void wait_products() { emulated::emulated_wait_products(NEWEST); }
inline void hold(float (&)[128]) {}

// Addresses in descriptors are relative to the block's dynamic shared memory.
inline unsigned long long matrix_descriptor(const void* shared, unsigned leading_bytes, unsigned stride_bytes) {
    const long long at = static_cast<const char*>(shared) - emulated::emulated_current->dynamic_shared;
    if (at < 0 || at > 0x3ffff || at % 16) emulated::emulated_fail("a matrix of a product is not in dynamic shared memory, at a multiple of 16");
    return static_cast<unsigned long long>(at >> 4) | static_cast<unsigned long long>(leading_bytes >> 4 & 0x3fff) << 16 |
           static_cast<unsigned long long>(stride_bytes >> 4 & 0x3fff) << 32 | 1ull << 62;
}
template <bool A_TRANSPOSED, bool B_TRANSPOSED>
inline void multiply_add_async(float (&d)[128], unsigned long long a, unsigned long long b) {
    emulated::emulated_multiply_add(d, a, b, A_TRANSPOSED, B_TRANSPOSED);
}

template <int REGISTERS> inline void give_registers() { static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256); }
template <int REGISTERS> inline void take_registers() { give_registers<REGISTERS>(); }

// ---- launches ----

// Calls a kernel with arguments that were packed one after the other, each aligned to 64 bytes.
template <class... A> struct EmulatedCall {
    static constexpr std::size_t room(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
    static constexpr std::size_t BYTES = (room(sizeof(A)) + ... + 0);

    static void pack(void** arguments, char* to) {
        ((std::memcpy(to, *arguments++, sizeof(A)), to += room(sizeof(A))), ...);
    }
    template <void (*KERNEL_FUNCTION)(A...)> static void run(const char* from) {
        const char* next = from;
        // Braces evaluate in order.
        std::tuple<const A*...> arguments{take<A>(next)...};
        std::apply([](const A*... argument) { KERNEL_FUNCTION(*argument...); }, arguments);
        delete static_cast<EmulatedCopies*>(emulated::emulated_current->copies);
    }

  private:
    template <class T> static const T* take(const char*& next) {
        const T* argument = reinterpret_cast<const T*>(next);
        next += room(sizeof(T));
        return argument;
    }
};
template <class... A> EmulatedCall<A...> emulated_call(void (*)(A...));

#define EMULATED_KERNEL(NAME)                                                                                          \
    extern "C" __attribute__((visibility("default"))) const emulated::Kernel NAME##_emulated = {                       \
        decltype(emulated_call(NAME))::BYTES, decltype(emulated_call(NAME))::pack,                                     \
        decltype(emulated_call(NAME))::run<NAME>};
