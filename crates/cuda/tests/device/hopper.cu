// Kernels that use the copy engine and the products of a Hopper GPU, and next to them how they are wrong.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

enum Mistake { NONE, LATE_WAIT, NO_RELEASE, TOO_FEW_BYTES, BETWEEN_16_BYTES };

DEVICE u8* aligned_shared(u8* shared) { return shared + (1024 - (u64)shared % 1024) % 1024; }

// ---- boxes ----

struct Copies {
    TensorMap map;
    const int* places; // (boxes, 3)
    u16* out;          // (boxes, 64 rows, 64)
    int boxes;
};

// Copies boxes of (2, 32, 64) elements to `out`. A warp loads them into two slots, a warpgroup stores them.
template <Mistake MISTAKE> DEVICE void copy_boxes(const Copies& work) {
    constexpr int SLOTS = 2, ROWS = 64, BYTES = ROWS * 128;
    extern __shared__ u8 shared[];
    u8* slots = aligned_shared(shared);
    u64* full = (u64*)(slots + SLOTS * BYTES);
    u64* empty = full + SLOTS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) init_mbarrier(full + i, 1), init_mbarrier(empty + i, 128);
        publish_mbarriers();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        if (threadIdx.x > 128) return;
        for (int i = 0; i < work.boxes; i++) {
            const int slot = i % SLOTS, *at = work.places + 3 * i;
            if (MISTAKE != NO_RELEASE) wait_mbarrier(empty + slot, i / SLOTS % 2 ^ 1);
            arrive_and_expect(full + slot, MISTAKE == TOO_FEW_BYTES ? BYTES + 16 : BYTES);
            load_box(slots + slot * BYTES, &work.map, full + slot, at[0] + (MISTAKE == BETWEEN_16_BYTES ? 4 : 0), at[1], at[2]);
        }
        return;
    }
    for (int i = 0; i < work.boxes; i++) {
        const int slot = i % SLOTS;
        if (MISTAKE != LATE_WAIT) wait_mbarrier(full + slot, i / SLOTS % 2);
        const u8* box = slots + slot * BYTES;
        // 16 bytes at a time: the row says where they are.
        for (int j = threadIdx.x; j < ROWS * 8; j += 128) {
            const int row = j / 8;
            *(uint4*)(work.out + i * ROWS * 64 + j * 8) = *(const uint4*)(box + row * 128 + (j % 8 ^ row % 8) * 16);
        }
        if (MISTAKE == LATE_WAIT) wait_mbarrier(full + slot, i / SLOTS % 2);
        arrive(empty + slot);
    }
}

KERNEL boxes(const __grid_constant__ Copies work) { copy_boxes<NONE>(work); }
KERNEL boxes_with_late_wait(const __grid_constant__ Copies work) { copy_boxes<LATE_WAIT>(work); }
KERNEL boxes_without_release(const __grid_constant__ Copies work) { copy_boxes<NO_RELEASE>(work); }
KERNEL boxes_between_16_bytes(const __grid_constant__ Copies work) { copy_boxes<BETWEEN_16_BYTES>(work); }
KERNEL boxes_of_too_few_bytes(const __grid_constant__ Copies work) { copy_boxes<TOO_FEW_BYTES>(work); }

// ---- products ----

struct Operands {
    TensorMap a, b;
    float* out; // (64, 256)
    int steps;  // of 64 along the inner dimension
};

// out = 1 + a · b. The operands of a step have two places in shared memory.
template <bool A_TRANSPOSED, bool B_TRANSPOSED, Mistake MISTAKE = NONE> DEVICE void multiply(const Operands& work) {
    constexpr int M = 64, N = 256, K = 64, PIECE = 64 * 128, A_BYTES = M * K * 2, B_BYTES = N * K * 2;
    extern __shared__ u8 shared[];
    u8* a = aligned_shared(shared);
    u8* b = a + 2 * A_BYTES;
    u64* full = (u64*)(b + 2 * B_BYTES);
    if (threadIdx.x == 0) {
        init_mbarrier(full, 1), init_mbarrier(full + 1, 1);
        publish_mbarriers();
    }
    __syncthreads();
    const auto load = [&](int step) {
        const int slot = step % 2;
        u8 *to_a = a + slot * A_BYTES, *to_b = b + slot * B_BYTES;
        arrive_and_expect(full + slot, A_BYTES + B_BYTES);
        if (A_TRANSPOSED) load_box(to_a, &work.a, full + slot, 0, step * K, 0);
        else load_box(to_a, &work.a, full + slot, step * K, 0, 0);
        if (B_TRANSPOSED) {
            for (int i = 0; i < N / 64; i++) load_box(to_b + i * PIECE, &work.b, full + slot, 64 * i, step * K, 0);
        } else {
            for (int i = 0; i < N / 64; i++) load_box(to_b + i * PIECE, &work.b, full + slot, step * K, 64 * i, 0);
        }
    };
    float sums[128];
#pragma unroll
    for (int i = 0; i < 128; i++) sums[i] = 1.0f;
    if (threadIdx.x == 0) load(0);
    for (int step = 0; step < work.steps; step++) {
        const int slot = step % 2;
        if (MISTAKE != LATE_WAIT) wait_mbarrier(full + slot, step / 2 % 2);
        const u64 from_a = matrix_descriptor(a + slot * A_BYTES, PIECE, 1024);
        const u64 from_b = matrix_descriptor(b + slot * B_BYTES, PIECE, 1024);
        hold(sums);
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < K / 16; k++) {
            // 16 elements of a row, or 16 rows of 128 bytes
            const u64 a_step = (A_TRANSPOSED ? 2048 : 32) / 16 * k, b_step = (B_TRANSPOSED ? 2048 : 32) / 16 * k;
            multiply_add_async<A_TRANSPOSED, B_TRANSPOSED>(sums, from_a + a_step, from_b + b_step);
        }
        commit_products();
        hold(sums);
        // The products of the step before are complete, so that the next step can be loaded to their place.
        if (MISTAKE == LATE_WAIT) wait_products<0>(), wait_mbarrier(full + slot, step / 2 % 2);
        else if (MISTAKE != NO_RELEASE) wait_products<1>();
        __syncthreads();
        if (threadIdx.x == 0 && step + 1 < work.steps) load(step + 1);
    }
    wait_products<0>();
    hold(sums);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 128; i++) work.out[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

KERNEL product(const __grid_constant__ Operands work) { multiply<false, false>(work); }
KERNEL product_a_transposed(const __grid_constant__ Operands work) { multiply<true, false>(work); }
KERNEL product_b_transposed(const __grid_constant__ Operands work) { multiply<false, true>(work); }
KERNEL product_both_transposed(const __grid_constant__ Operands work) { multiply<true, true>(work); }
KERNEL product_with_late_wait(const __grid_constant__ Operands work) { multiply<false, false, LATE_WAIT>(work); }
KERNEL product_without_release(const __grid_constant__ Operands work) { multiply<false, false, NO_RELEASE>(work); }

// Nobody waits for the product.
KERNEL product_without_end(const __grid_constant__ Operands work) {
    extern __shared__ u8 shared[];
    float sums[128];
    for (int i = 0; i < 128; i++) sums[i] = 0.0f;
    u8* matrix = aligned_shared(shared);
    for (int i = threadIdx.x; i < 256 * 8; i += 128) ((uint4*)matrix)[i] = make_uint4(0, 0, 0, 0);
    fence_async_shared();
    __syncthreads();
    const u64 operand = matrix_descriptor(matrix, 8192, 1024);
    warpgroup_fence();
    multiply_add_async<false, false>(sums, operand, operand);
    commit_products();
}

#endif
