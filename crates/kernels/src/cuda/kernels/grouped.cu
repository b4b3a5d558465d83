// Products of groups of rows, each group with a matrix of its own: the experts of a mixture. One launch does all groups; where
// they begin is read from device memory, so that the host does not wait for it. Hopper only, bf16 with sums in f32.
//
//     rows · wᵀ      (rows, k) · (n, k)ᵀ       forward
//     rows · w       (rows, k) · (k, n)        gradient of the input
//     rowsᵀ · rows   (rows, m)ᵀ · (rows, n)    gradient of the matrix, (m, n)
//
// A block computes tiles of (128, 256), one after the other. One thread lets the copy engine load 64 of the inner dimension at a
// time into four slots of shared memory. Two warpgroups multiply, each 64 rows of the tile, and store their sums.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace grouped {

constexpr int M = 128, N = 256, K = 64, SLOTS = 4;
constexpr int THREADS = 384;
// 64 rows of 128 bytes: what one box of a transposed operand has.
constexpr int PIECE = 64 * 128;
constexpr int A_BYTES = M * K * 2, B_BYTES = N * K * 2;

struct Work {
    TensorMap a, b;
    void* out;
    // (groups + 1): the first row of each group.
    const u32* starts;
    // Elements from the output of a group to that of the next; 0 if the outputs are rows of one matrix.
    i64 out_stride;
    // `m` and `k` are zero where they are the rows of a group.
    int groups, m, n, k;
    int accumulate;
};

enum Kind { FORWARD, INPUT, WEIGHT };

DEVICE int pieces(int whole, int part) { return (whole + part - 1) / part; }

// A tile of the output.
struct Tile {
    int group, first_row, rows; // of the group
    int m, n;                   // its place in the group's output
    int steps;                  // along the inner dimension
};

// The tiles of a block. Everybody that walks gets the same.
template <Kind KIND> struct Walk {
    const Work& work;
    const u32* starts;
    int index, group, before; // tiles before the group

    DEVICE Walk(const Work& work, const u32* starts)
        : work(work), starts(starts), index(blockIdx.x), group(0), before(0) {}

    DEVICE bool next(Tile& tile) {
        const int across = pieces(work.n, N);
        for (; group < work.groups; group++) {
            const int first = (int)starts[group], rows = (int)starts[group + 1] - first;
            const int down = pieces(KIND == WEIGHT ? work.m : rows, M);
            if (index - before < down * across) {
                const int place = index - before;
                tile = {group, first, rows, place % down * M, place / down * N, pieces(KIND == WEIGHT ? rows : work.k, K)};
                index += gridDim.x;
                return true;
            }
            before += down * across;
        }
        return false;
    }
};

// Which slot is next. Parity changes with each round.
struct Ring {
    int slot = 0;
    u32 parity = 0;

    DEVICE void advance() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

template <Kind KIND>
DEVICE void load(const Work& work, const Tile& tile, int step, u8* a, u8* b, u64* full) {
    const int inner = step * K, row = tile.first_row;
    if (KIND == WEIGHT) {
        for (int i = 0; i < M / 64; i++) load_box(a + i * PIECE, &work.a, full, tile.m + 64 * i, row + inner, 0);
    } else {
        load_box(a, &work.a, full, inner, row + tile.m, 0);
    }
    if (KIND == FORWARD) {
        load_box(b, &work.b, full, inner, tile.n, tile.group);
    } else {
        const int y = KIND == WEIGHT ? row + inner : inner, z = KIND == WEIGHT ? 0 : tile.group;
        for (int i = 0; i < N / 64; i++) load_box(b + i * PIECE, &work.b, full, tile.n + 64 * i, y, z);
    }
}

// Before: lane l of four has column l of a (4, 4) matrix of words. After: row l.
DEVICE void transpose_quad(u32 (&w)[4], int lane) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
        const bool high = lane & mask;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 &low = w[mask == 1 ? 2 * i : i], &up = w[mask == 1 ? 2 * i + 1 : i + 2];
            const u32 got = __shfl_xor_sync(ALL_LANES, high ? low : up, mask);
            if (high) low = got;
            else up = got;
        }
    }
}

// Stores the sums of a warpgroup: 64 rows from `m` on, of which `rows` are real.
DEVICE void store(bf16* out, const float (&sums)[128], const Work& work, const Tile& tile, int rows) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        bf16* to = out + (i64)(row + 8 * half) * work.n + tile.n;
        const bool real = row + 8 * half < rows;
#pragma unroll
        for (int j = 0; j < N / 8; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = 4 * (j + i) + 2 * half;
                float x = sums[at], y = sums[at + 1];
                if (work.accumulate) {
                    const int column = 8 * (j + i) + 2 * (lane % 4);
                    if (real && tile.n + column < work.n) {
                        const u32 old = *(const u32*)(to + column);
                        x += low_half(old), y += high_half(old);
                    }
                }
                w[i] = pack_bf16(x, y);
            }
            // A lane has two columns of each of four runs of eight. It stores one run, which four lanes have read.
            if (work.accumulate) __syncwarp();
            transpose_quad(w, lane);
            const int column = 8 * (j + lane % 4);
            if (real && tile.n + column < work.n) *(uint4*)(to + column) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

DEVICE void store(float* out, const float (&sums)[128], const Work& work, const Tile& tile, int rows) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + 8 * half >= rows) continue;
        float* to = out + (i64)(row + 8 * half) * work.n;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const int column = tile.n + 8 * j + 2 * (lane % 4);
            if (column >= work.n) continue;
            float2 sum = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
            if (work.accumulate) {
                const float2 old = *(const float2*)(to + column);
                sum.x += old.x, sum.y += old.y;
            }
            *(float2*)(to + column) = sum;
        }
    }
}

template <Kind KIND, class OUT>
DEVICE void run(const Work& work) {
    extern __shared__ u8 shared[];
    u8* a = shared + (1024 - (u64)shared % 1024) % 1024; // (SLOTS, M, K)
    u8* b = a + SLOTS * A_BYTES;                         // (SLOTS, N, K)
    u64* full = (u64*)(b + SLOTS * B_BYTES);             // (SLOTS): a slot is loaded
    u64* empty = full + SLOTS;                           // (SLOTS): eight warps have multiplied it
    u32* starts = (u32*)(empty + SLOTS);                 // (groups + 1)
    for (int i = threadIdx.x; i <= work.groups; i += THREADS) starts[i] = work.starts[i];
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) init_mbarrier(full + i, 1), init_mbarrier(empty + i, 8);
        publish_mbarriers();
    }
    __syncthreads();

    Walk<KIND> walk(work, starts);
    Tile tile;
    Ring ring;
    if (threadIdx.x < 128) {
        give_registers<40>();
        if (threadIdx.x > 0) return;
        while (walk.next(tile))
            for (int step = 0; step < tile.steps; step++, ring.advance()) {
                const int slot = ring.slot;
                wait_mbarrier(empty + slot, ring.parity ^ 1);
                arrive_and_expect(full + slot, A_BYTES + B_BYTES);
                load<KIND>(work, tile, step, a + slot * A_BYTES, b + slot * B_BYTES, full + slot);
            }
        return;
    }
    take_registers<232>();
    const int own = threadIdx.x / 128 - 1; // the warpgroup's rows are 64 · own + 0..64
    const bool first_lane = threadIdx.x % 32 == 0;
    while (walk.next(tile)) {
        float sums[128];
#pragma unroll
        for (int i = 0; i < 128; i++) sums[i] = 0.0f;
        int last = -1; // the slot of the step before
        for (int step = 0; step < tile.steps; step++, ring.advance()) {
            const int slot = ring.slot;
            u8* own_a = a + slot * A_BYTES + own * PIECE;
            wait_mbarrier(full + slot, ring.parity);
            if (KIND == WEIGHT) {
                // Rows after the end of the group belong to the next one: zero in one operand.
                const int real = tile.rows - step * K;
                if (real < K) {
                    for (int i = 8 * real + threadIdx.x % 128; i < PIECE / 16; i += 128)
                        ((uint4*)own_a)[i] = make_uint4(0, 0, 0, 0);
                    fence_async_shared();
                    barrier(1 + own, 128);
                }
            }
            // Descriptors count in units of 16 bytes. A step of 16 along the inner dimension is 32 bytes of a row, or 16 rows.
            constexpr int A_STEP = KIND == WEIGHT ? 16 * 128 / 16 : 2, B_STEP = KIND == FORWARD ? 2 : 16 * 128 / 16;
            const u64 left = matrix_descriptor(own_a, PIECE, 1024);
            const u64 right = matrix_descriptor(b + slot * B_BYTES, PIECE, 1024);
            hold(sums);
            warpgroup_fence();
#pragma unroll
            for (int i = 0; i < K / 16; i++)
                multiply_add_async<KIND == WEIGHT, KIND != FORWARD>(sums, left + i * A_STEP, right + i * B_STEP);
            commit_products();
            hold(sums);
            wait_products<1>();
            if (first_lane && last >= 0) arrive(empty + last);
            last = slot;
        }
        wait_products<0>();
        hold(sums);
        if (first_lane && last >= 0) arrive(empty + last);
        const int first = tile.m + 64 * own, rows = (KIND == WEIGHT ? work.m : tile.rows) - first;
        const i64 row = KIND == WEIGHT ? first : tile.first_row + first;
        if (rows > 0) store((OUT*)work.out + tile.group * work.out_stride + row * work.n, sums, work, tile, rows);
    }
}

} // namespace grouped

KERNEL __launch_bounds__(grouped::THREADS, 1) grouped_forward(const __grid_constant__ grouped::Work work) {
    grouped::run<grouped::FORWARD, bf16>(work);
}

KERNEL __launch_bounds__(grouped::THREADS, 1) grouped_input(const __grid_constant__ grouped::Work work) {
    grouped::run<grouped::INPUT, bf16>(work);
}

KERNEL __launch_bounds__(grouped::THREADS, 1) grouped_weight_bf16(const __grid_constant__ grouped::Work work) {
    grouped::run<grouped::WEIGHT, bf16>(work);
}

KERNEL __launch_bounds__(grouped::THREADS, 1) grouped_weight_f32(const __grid_constant__ grouped::Work work) {
    grouped::run<grouped::WEIGHT, float>(work);
}

#endif

// The largest difference of two outputs, and the largest number of the first, as bits of floats that are not negative.
// NaN counts as infinity.
template <class T> DEVICE void compare(const T* a, const T* b, i64 count, u32* result) {
    float difference = 0.0f, size = 0.0f;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const float x = to_float(a[i]), y = to_float(b[i]), d = fabsf(x - y);
        difference = d == d ? fmaxf(difference, d) : infinity();
        size = x == x ? fmaxf(size, fabsf(x)) : infinity();
    }
    atomicMax(result, __float_as_uint(difference));
    atomicMax(result + 1, __float_as_uint(size));
}

KERNEL grouped_compare_bf16(const bf16* a, const bf16* b, i64 count, u32* result) { compare(a, b, count, result); }
KERNEL grouped_compare_f32(const float* a, const float* b, i64 count, u32* result) { compare(a, b, count, result); }
