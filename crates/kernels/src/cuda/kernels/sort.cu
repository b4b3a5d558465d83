// A stable radix sort of (key, value) pairs, 8 bits of the key per pass. A pass counts the digits of each tile, turns the
// counts into places, and moves the pairs.

constexpr int DIGITS = 256;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int PER_LANE = 8;
constexpr int TILE = THREADS * PER_LANE;

// counts[digit][tile]
KERNEL __launch_bounds__(THREADS) sort_count(const u32* keys, u32* counts, i64 n, i32 shift) {
    __shared__ u32 shared[DIGITS];
    shared[threadIdx.x] = 0;
    __syncthreads();
    for (int k = 0; k < PER_LANE; k++) {
        const i64 i = (i64)blockIdx.x * TILE + k * THREADS + threadIdx.x;
        if (i < n) atomicAdd(&shared[keys[i] >> shift & (DIGITS - 1)], 1u);
    }
    __syncthreads();
    counts[(i64)threadIdx.x * gridDim.x + blockIdx.x] = shared[threadIdx.x];
}

// Replaces n counts by the sums of those before them. One block.
KERNEL __launch_bounds__(1024) sort_places(u32* counts, i64 n) {
    constexpr int RUN = 8;
    __shared__ u32 shared[32];
    u32 before = 0;
    for (i64 base = 0; base < n; base += 1024 * RUN) {
        const i64 first = base + threadIdx.x * RUN;
        u32 run[RUN], sum = 0, total;
        for (int k = 0; k < RUN; k++) sum += run[k] = first + k < n ? counts[first + k] : 0;
        u32 place = before + block_sum_before(sum, shared, total);
        for (int k = 0; k < RUN; k++) {
            if (first + k < n) counts[first + k] = place;
            place += run[k];
        }
        before += total;
    }
}

// Without values, the value of a pair is its index.
KERNEL __launch_bounds__(THREADS) sort_move(
    const u32* keys, const u32* values, const u32* places, u32* keys_out, u32* values_out, i64 n, i32 shift
) {
    __shared__ u32 shared[WARPS][DIGITS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int w = 0; w < WARPS; w++) shared[w][threadIdx.x] = 0;
    __syncthreads();

    // Each warp has adjacent pairs. The rank of a pair counts the pairs before it that have the same digit.
    const i64 first = (i64)blockIdx.x * TILE + warp * (32 * PER_LANE) + lane;
    u32 rank[PER_LANE], key[PER_LANE];
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        const bool valid = first + k * 32 < n;
        key[k] = valid ? keys[first + k * 32] : 0;
        const u32 digit = key[k] >> shift & (DIGITS - 1);
        const u32 same = __match_any_sync(ALL_LANES, valid ? digit : DIGITS);
        const u32 before = __popc(same & ((1u << lane) - 1));
        rank[k] = valid ? shared[warp][digit] + before : 0;
        __syncwarp();
        if (valid && before == 0) shared[warp][digit] += __popc(same);
        __syncwarp();
    }
    __syncthreads();

    // Counts of warps become the places of their first pairs; one thread per digit.
    u32 place = places[(i64)threadIdx.x * gridDim.x + blockIdx.x];
    for (int w = 0; w < WARPS; w++) {
        const u32 count = shared[w][threadIdx.x];
        shared[w][threadIdx.x] = place;
        place += count;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < PER_LANE; k++) {
        const i64 i = first + k * 32;
        if (i < n) {
            const u32 to = shared[warp][key[k] >> shift & (DIGITS - 1)] + rank[k];
            keys_out[to] = key[k];
            values_out[to] = values ? values[i] : (u32)i;
        }
    }
}
