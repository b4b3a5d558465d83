// Instructions of Hopper: copies of boxes of a tensor to shared memory, and products whose operands are there.

// The emulated GPU has functions of its own with these names (crates/cuda/emulator/device.h).
#if defined(__CUDACC_RTC__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A tensor and the boxes that are copied of it (crates/cuda/src/tensor_map.rs).
struct alignas(64) TensorMap {
    u64 words[16];
};

// A barrier in shared memory, which counts arrivals and bytes that were copied.
DEVICE void init_mbarrier(u64* barrier, u32 arrivals) {
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}

// Shows new barriers to the copy engine.
DEVICE void publish_mbarriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(u64* barrier) {
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

// Arrives, and lets the phase wait for copies of `bytes` bytes.
DEVICE void arrive_and_expect(u64* barrier, u32 bytes) {
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Waits until the phase with this parity is complete. The first phase has parity 0.
DEVICE void wait_mbarrier(u64* barrier, u32 parity) {
    const u32 at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(at), "r"(parity) : "memory");
}

// Starts to copy the box at (x, y, z) to shared memory, at a multiple of 1024 bytes. Elements outside the tensor are zero,
// and count as copied. x is a multiple of 8, 16 bytes: others are an illegal instruction.
DEVICE void load_box(void* shared, const TensorMap* map, u64* barrier, int x, int y, int z) {
    const u32 to = (u32)__cvta_generic_to_shared(shared), at = (u32)__cvta_generic_to_shared(barrier);
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(at), "r"(x), "r"(y), "r"(z) : "memory");
}

// Shows this thread's stores to shared memory to the copy engine and to `multiply_add_async`.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Before the first product that uses registers that others have written.
DEVICE void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the newest groups of products.
template <int NEWEST> DEVICE void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
}

// Keeps the compiler from moving work on `d` across the products that use it.
DEVICE void hold(float (&d)[128]) {
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// A matrix in shared memory with the 128-byte swizzle, in pieces of 8 rows of 128 bytes. Rows are along the inner dimension
// of the product: `stride_bytes` between pieces of 8 rows (of the outer dimension). Transposed, rows are along the outer
// dimension: `leading_bytes` between pieces of 64 elements of it, `stride_bytes` between 8 of the inner dimension.
DEVICE u64 matrix_descriptor(const void* shared, u32 leading_bytes, u32 stride_bytes) {
    const u32 at = (u32)__cvta_generic_to_shared(shared);
    return (u64)((at & 0x3ffff) >> 4) | (u64)(leading_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 | 1ull << 62;
}

// d += a · b of bf16, (64, 16) · (16, 256), for the 128 threads of a warpgroup: a thread has rows
// 16 (warp % 4) + lane / 4 + 8 (i / 2 % 2) and columns 8 (i / 4) + 2 (lane % 4) + i % 2. It is complete after `wait_products`.
template <bool A_TRANSPOSED, bool B_TRANSPOSED> DEVICE void multiply_add_async(float (&d)[128], u64 a, u64 b) {
    asm volatile("{\n.reg .pred adds;\n"
                 "setp.ne.b32 adds, %132, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "%128, %129, adds, 1, 1, %130, %131;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
                   "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
                   "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
                   "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
                   "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
                   "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
                   "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
                   "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
                   "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
                 : "l"(a), "l"(b), "n"((int)A_TRANSPOSED), "n"((int)B_TRANSPOSED), "r"(1));
}

// Registers that warps of the same role give back to the block, or take.
template <int REGISTERS> DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
