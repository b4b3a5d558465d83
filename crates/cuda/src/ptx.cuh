// Instructions that CUDA C++ has no function for.

// The emulated GPU has functions of its own with these names (crates/cuda/emulator/device.h).
#ifdef __CUDACC_RTC__

// Two numbers as bf16, rounded to nearest, ties to even; `low` is the first in memory.
DEVICE u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

DEVICE float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

DEVICE u16 float_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Four numbers as fp8; `a` is the first in memory. Architectures before 8.9 have no fp8.
#if __CUDA_ARCH__ >= 890
#define PACK_FP8(NAME, FORMAT)                                                                                         \
    DEVICE u32 NAME(float a, float b, float c, float d) {                                                              \
        u32 all;                                                                                                       \
        asm("{\n.reg .b16 low, high;\n"                                                                                \
            "cvt.rn.satfinite." FORMAT "x2.f32 low, %2, %1;\n"                                                         \
            "cvt.rn.satfinite." FORMAT "x2.f32 high, %4, %3;\n"                                                        \
            "mov.b32 %0, {low, high};\n}"                                                                              \
            : "=r"(all)                                                                                                \
            : "f"(a), "f"(b), "f"(c), "f"(d));                                                                         \
        return all;                                                                                                    \
    }
PACK_FP8(pack_e4m3, "e4m3")
PACK_FP8(pack_e5m2, "e5m2")
#endif

// 2^x; results below the smallest normal number are zero.
DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A barrier of `threads` threads; 0 is that of the block.
DEVICE void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Starts to copy 16 bytes to shared memory: the first `bytes` are read, the others are zero.
DEVICE void copy_16_async(void* shared, const void* global, int bytes) {
    const u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

DEVICE void copy_16_async(void* shared, const void* global) {
    const u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// Ends a group of copies.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the newest groups of this thread's copies.
template <int NEWEST> DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }

// Four 8 × 8 matrices of 16-bit elements from shared memory; a lane gives the address of one row, and receives two neighbors
// of a row of each.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    const u32 from = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// The same, each matrix transposed.
DEVICE void load_transposed(u32 (&to)[4], const void* row) {
    const u32 from = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// c += a · b of bf16, (16, 16) · (16, 8)
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
