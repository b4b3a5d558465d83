// Attention in bf16 on tensor cores. HEAD_DIM is a multiple of 16: smaller heads are padded with zeros in shared
// memory.
//
// 4 warps with 16 rows of a tile each. Scores stay in registers, as fragments of mma.m16n8k16: a lane has
// rows lane / 4 and lane / 4 + 8, and columns 2 (lane % 4) + 0..2 of every 8.

namespace attention {

constexpr int BF16_THREADS = 128;
constexpr int BF16_ROWS = 64;

// Copies ROWS rows to shared memory, with zeros after `rows` rows and `dim` columns. `aligned`: addresses, strides
// and `dim` are multiples of 16 bytes.
template <int D, int ROWS>
__device__ void load_bf16(u16* to, const u16* from, i64 stride, int rows, int dim, bool aligned) {
    if (aligned) {
        for (int i = threadIdx.x; i < ROWS * (D / 8); i += BF16_THREADS) {
            int row = i / (D / 8), column = i % (D / 8) * 8;
            bool real = row < rows && column < dim;
            copy_16_async(to + row * (D + 8) + column, real ? from + row * stride + column : from, real ? 16 : 0);
        }
    } else {
        for (int i = threadIdx.x; i < ROWS * D; i += BF16_THREADS) {
            int row = i / D, column = i % D;
            to[row * (D + 8) + column] = row < rows && column < dim ? from[row * stride + column] : (u16)0;
        }
    }
}

// c = a · bᵀ, (16, D) · (N, D)ᵀ for one warp; `a` are the warp's own rows.
template <int D, int N>
__device__ void scores_bf16(float (&c)[N / 8][4], const u16* a, const u16* b) {
    int lane = threadIdx.x % 32;
    a += lane % 16 * (D + 8) + lane / 16 * 8;
    b += (lane / 16 * 8 + lane % 8) * (D + 8) + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0.0f;
    // Unrolled further, large heads would need more registers than there are.
    constexpr int UNROLL = D > 128 ? 2 : D / 16;
#pragma unroll UNROLL
    for (int d = 0; d < D; d += 16) {
        u32 x[4];
        load_matrices(x, a + d);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            u32 y[4];
            load_matrices(y, b + n * (D + 8) + d);
            multiply_add(c[n / 8], x, y[0], y[1]);
            multiply_add(c[n / 8 + 1], x, y[2], y[3]);
        }
    }
}

// sums += p · v, (16, N) · (N, C) for one warp. `p` is rounded to bf16; `v` has rows of D + 8 elements, and points to
// the first of C columns.
template <int D, int C, int N>
__device__ void add_product_bf16(float (&sums)[C / 8][4], const float (&p)[N / 8][4], const u16* v) {
    int lane = threadIdx.x % 32;
    v += lane % 16 * (D + 8) + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        const float(&left)[4] = p[n / 8], (&right)[4] = p[n / 8 + 1];
        u32 x[4] = {
            pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), //
            pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])
        };
#pragma unroll
        for (int d = 0; d < C; d += 16) {
            u32 y[4];
            load_transposed(y, v + n * (D + 8) + d);
            multiply_add(sums[d / 8], x, y[0], y[1]);
            multiply_add(sums[d / 8 + 1], x, y[2], y[3]);
        }
    }
}

// Stores factor * sums as rows of a gradient: the warp's rows, from `first_row` on, and C columns from `column` on.
template <int C>
__device__ void store_bf16(
    const Target& to, i64 first_row, int rows, i64 column, int dim, const float (&factor)[2],
    const float (&sums)[C / 8][4]
) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < C / 8; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, at = d * 8 + lane % 4 * 2 + i % 2;
            if (row < rows && at < dim) to.store(first_row + row, column + at, factor[i / 2] * sums[d][i]);
        }
}

template <int C>
__device__ void zero(float (&sums)[C][4]) {
#pragma unroll
    for (int d = 0; d < C; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[d][i] = 0.0f;
}

// N keys at a time.
template <int D, int N>
__device__ void forward_bf16(
    const Shape& shape, const Qkv<u16>& in, const Target& out, float* lse, bool aligned
) {
    extern __shared__ float4 shared[];
    u16* queries = (u16*)shared;                       // (BF16_ROWS, D + 8)
    u16* key_tiles = queries + BF16_ROWS * (D + 8);    // two of (N, D + 8)
    u16* value_tiles = key_tiles + 2 * N * (D + 8);    // two of (N, D + 8)
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int tiles = tiles_of(shape.q_len, BF16_ROWS), dim = shape.head_dim;
    Place place(shape.heads, tiles);
    // The longest rows first.
    int first = (tiles - 1 - place.tile) * BF16_ROWS, rows = min(BF16_ROWS, shape.q_len - first);
    i64 token = place.batch * shape.q_len + first;
    i64 column = (i64)place.head * dim, kv_column = (i64)(place.head / shape.group) * dim;
    const u16* k = in.k + place.batch * shape.k_len * in.k_stride + kv_column;
    const u16* v = in.v + place.batch * shape.k_len * in.v_stride + kv_column;
    int end = shape.visible_keys(first + rows - 1);
    auto load = [&](int key) {
        int slot = key / N % 2 * N * (D + 8), count = min(N, shape.k_len - key);
        load_bf16<D, N>(key_tiles + slot, k + key * in.k_stride, in.k_stride, count, dim, aligned);
        load_bf16<D, N>(value_tiles + slot, v + key * in.v_stride, in.v_stride, count, dim, aligned);
    };
    load_bf16<D, BF16_ROWS>(queries, in.q + token * in.q_stride + column, in.q_stride, rows, dim, aligned);
    if (end > 0) load(0);
    commit_copies();

    int own = first + warp * 16 + lane / 4; // this lane's first query; the second is 8 further
    float top[2] = {INITIAL_MAX, INITIAL_MAX}, total[2] = {0.0f, 0.0f}, sums[D / 8][4];
    zero(sums);
    for (int key = 0; key < end; key += N) {
        if (key + N < end) load(key + N);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        int slot = key / N % 2 * N * (D + 8);
        float score[N / 8][4];
        scores_bf16<D, N>(score, queries + warp * 16 * (D + 8), key_tiles + slot);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int visible = shape.visible_keys(own + 8 * half) - key;
            float most = top[half];
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& s = score[n][2 * half + i];
                    s = n * 8 + lane % 4 * 2 + i < visible ? s * (shape.scale * LOG2_E) : -infinity();
                    most = fmaxf(most, s);
                }
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
            float rescale = exp2f(top[half] - most);
            top[half] = most;
            total[half] *= rescale;
#pragma unroll
            for (int d = 0; d < D / 8; d++) sums[d][2 * half] *= rescale, sums[d][2 * half + 1] *= rescale;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& s = score[n][2 * half + i];
                    s = exp2f(s - most);
                    total[half] += s;
                }
        }
        add_product_bf16<D, D, N>(sums, score, value_tiles + slot);
        __syncthreads();
    }
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 1);
        total[half] += __shfl_xor_sync(ALL_LANES, total[half], 2);
        bool sees = shape.visible_keys(own + 8 * half) > 0;
        factor[half] = 1.0f / total[half];
        if (!sees) {
            factor[half] = 0.0f;
#pragma unroll
            for (int d = 0; d < D / 8; d++) sums[d][2 * half] = sums[d][2 * half + 1] = 0.0f;
        }
        if (lane % 4 == 0 && own + 8 * half < shape.q_len)
            lse[(place.batch * shape.heads + place.head) * shape.q_len + own + 8 * half] =
                sees ? (top[half] + log2f(total[half])) * LN_2 : -infinity();
    }
    store_bf16<D>(out, token + warp * 16, rows - warp * 16, column, dim, factor, sums);
}

// N keys at a time.
template <int D, int N>
__device__ void backward_dq_bf16(
    const Shape& shape, const Qkv<u16>& in, const Saved<u16>& saved, const Target& dq, bool aligned
) {
    extern __shared__ float4 shared[];
    u16* queries = (u16*)shared;                    // (BF16_ROWS, D + 8)
    u16* douts = queries + BF16_ROWS * (D + 8);     // (BF16_ROWS, D + 8)
    u16* key_tiles = douts + BF16_ROWS * (D + 8);   // two of (N, D + 8)
    u16* value_tiles = key_tiles + 2 * N * (D + 8); // two of (N, D + 8)
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int tiles = tiles_of(shape.q_len, BF16_ROWS), dim = shape.head_dim;
    Place place(shape.heads, tiles);
    int first = (tiles - 1 - place.tile) * BF16_ROWS, rows = min(BF16_ROWS, shape.q_len - first);
    i64 token = place.batch * shape.q_len + first, width = (i64)shape.heads * dim;
    i64 column = (i64)place.head * dim, kv_column = (i64)(place.head / shape.group) * dim;
    const u16* k = in.k + place.batch * shape.k_len * in.k_stride + kv_column;
    const u16* v = in.v + place.batch * shape.k_len * in.v_stride + kv_column;
    int end = shape.visible_keys(first + rows - 1);
    auto load = [&](int key) {
        int slot = key / N % 2 * N * (D + 8), count = min(N, shape.k_len - key);
        load_bf16<D, N>(key_tiles + slot, k + key * in.k_stride, in.k_stride, count, dim, aligned);
        load_bf16<D, N>(value_tiles + slot, v + key * in.v_stride, in.v_stride, count, dim, aligned);
    };
    load_bf16<D, BF16_ROWS>(queries, in.q + token * in.q_stride + column, in.q_stride, rows, dim, aligned);
    load_bf16<D, BF16_ROWS>(douts, saved.dout + token * width + column, width, rows, dim, aligned);
    if (end > 0) load(0);
    commit_copies();

    int own = first + warp * 16 + lane / 4;
    float log_sum[2] = {infinity(), infinity()}, mean[2] = {0.0f, 0.0f}, sums[D / 8][4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = own + 8 * half;
        if (query < shape.q_len) {
            log_sum[half] = log2_sum(saved.lse[(place.batch * shape.heads + place.head) * shape.q_len + query]);
            mean[half] = saved.delta[(place.batch * shape.q_len + query) * shape.heads + place.head];
        }
    }
    zero(sums);
    for (int key = 0; key < end; key += N) {
        if (key + N < end) load(key + N);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        int slot = key / N % 2 * N * (D + 8);
        float score[N / 8][4], dprob[N / 8][4];
        scores_bf16<D, N>(score, queries + warp * 16 * (D + 8), key_tiles + slot);
        scores_bf16<D, N>(dprob, douts + warp * 16 * (D + 8), value_tiles + slot);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int visible = shape.visible_keys(own + 8 * half) - key;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    float prob = exp2f(score[n][i] * (shape.scale * LOG2_E) - log_sum[half]);
                    bool sees = n * 8 + lane % 4 * 2 + i % 2 < visible;
                    score[n][i] = sees ? prob * (dprob[n][i] - mean[half]) : 0.0f;
                }
        }
        add_product_bf16<D, D, N>(sums, score, key_tiles + slot);
        __syncthreads();
    }
    float factor[2] = {shape.scale, shape.scale};
    store_bf16<D>(dq, token + warp * 16, rows - warp * 16, column, dim, factor, sums);
}

// N queries at a time. A block computes C of the D columns, so that the sums fit in registers.
template <int D, int C, int N>
__device__ void backward_dkv_bf16(
    const Shape& shape, const Qkv<u16>& in, const Saved<u16>& saved, const Target& dk, const Target& dv, bool aligned
) {
    extern __shared__ float4 shared[];
    u16* keys = (u16*)shared;                          // (BF16_ROWS, D + 8)
    u16* values = keys + BF16_ROWS * (D + 8);          // (BF16_ROWS, D + 8)
    u16* query_tiles = values + BF16_ROWS * (D + 8);   // two of (N, D + 8)
    u16* dout_tiles = query_tiles + 2 * N * (D + 8);   // two of (N, D + 8)
    float* log_sums = (float*)(dout_tiles + 2 * N * (D + 8)); // two of (N)
    float* means = log_sums + 2 * N;                          // two of (N)
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = shape.head_dim;
    i64 width = (i64)shape.heads * dim;
    int tiles = tiles_of(shape.k_len, BF16_ROWS);
    Place place(shape.heads / shape.group, tiles * (D / C));
    int part = place.tile % (D / C) * C, first = place.tile / (D / C) * BF16_ROWS;
    int count = min(BF16_ROWS, shape.k_len - first);
    i64 token = place.batch * shape.k_len + first, column = (i64)place.head * dim;

    // All pairs of a head of the group and a tile of queries that see these keys, one after the other.
    int start = shape.first_query(first) / N * N, per_head = tiles_of(shape.q_len - start, N);
    int steps = per_head * shape.group;
    auto load = [&](int step) {
        int head = place.head * shape.group + step / per_head, query = start + step % per_head * N;
        int slot = step % 2 * N * (D + 8), rows = min(N, shape.q_len - query);
        i64 from = place.batch * shape.q_len + query, at = (i64)head * dim;
        load_bf16<D, N>(query_tiles + slot, in.q + from * in.q_stride + at, in.q_stride, rows, dim, aligned);
        load_bf16<D, N>(dout_tiles + slot, saved.dout + from * width + at, width, rows, dim, aligned);
        for (int i = threadIdx.x; i < N; i += BF16_THREADS) {
            bool real = i < rows;
            i64 place_of_lse = (place.batch * shape.heads + head) * shape.q_len + query + i;
            log_sums[step % 2 * N + i] = real ? log2_sum(saved.lse[place_of_lse]) : infinity();
            means[step % 2 * N + i] = real ? saved.delta[(from + i) * shape.heads + head] : 0.0f;
        }
    };
    load_bf16<D, BF16_ROWS>(keys, in.k + token * in.k_stride + column, in.k_stride, count, dim, aligned);
    load_bf16<D, BF16_ROWS>(values, in.v + token * in.v_stride + column, in.v_stride, count, dim, aligned);
    if (steps > 0) load(0);
    commit_copies();

    float dkeys[C / 8][4], dvalues[C / 8][4];
    zero(dkeys);
    zero(dvalues);
    int own = first + warp * 16 + lane / 4;
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) load(step + 1);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        int query = start + step % per_head * N, slot = step % 2 * N * (D + 8);
        // Transposed: keys are rows, queries are columns.
        float prob[N / 8][4], dscore[N / 8][4];
        scores_bf16<D, N>(prob, keys + warp * 16 * (D + 8), query_tiles + slot);
        scores_bf16<D, N>(dscore, values + warp * 16 * (D + 8), dout_tiles + slot);
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int at = n * 8 + lane % 4 * 2 + j, visible = shape.visible_keys(query + at);
                float log_sum = log_sums[step % 2 * N + at], mean = means[step % 2 * N + at];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int i = 2 * half + j;
                    bool sees = own + 8 * half < visible;
                    float value = exp2f(prob[n][i] * (shape.scale * LOG2_E) - log_sum);
                    dscore[n][i] = sees ? value * (dscore[n][i] - mean) : 0.0f;
                    prob[n][i] = sees ? value : 0.0f;
                }
            }
        add_product_bf16<D, C, N>(dvalues, prob, dout_tiles + slot + part);
        add_product_bf16<D, C, N>(dkeys, dscore, query_tiles + slot + part);
        __syncthreads();
    }
    float scale[2] = {shape.scale, shape.scale}, one[2] = {1.0f, 1.0f};
    token += warp * 16, count -= warp * 16;
    store_bf16<C>(dk, token, count, column + part, dim - part, scale, dkeys);
    store_bf16<C>(dv, token, count, column + part, dim - part, one, dvalues);
}

// Keys at a time of the forward pass.
constexpr int KEYS = HEAD_DIM > 192 ? 32 : 64;
// Columns per block of the gradients of keys and values.
constexpr int COLUMNS = HEAD_DIM > 128 ? HEAD_DIM / 2 : HEAD_DIM;

} // namespace attention

KERNEL __launch_bounds__(128, 1) attention_forward_bf16(
    SHAPE_PARAMS, QKV_PARAMS(u16), void* out, i64 out_stride, int out_f32, float* lse,
    int aligned
) {
    attention::Target target{out, out_stride, out_f32, 0};
    attention::forward_bf16<HEAD_DIM, attention::KEYS>(SHAPE, QKV(u16), target, lse, aligned);
}

KERNEL __launch_bounds__(128, 1) attention_backward_dq_bf16(
    SHAPE_PARAMS, QKV_PARAMS(u16), SAVED_PARAMS(u16),
    void* dq, i64 dq_stride, int is_f32, int accumulate, int aligned
) {
    attention::Target target{dq, dq_stride, is_f32, accumulate};
    attention::backward_dq_bf16<HEAD_DIM, 32>(SHAPE, QKV(u16), SAVED(u16), target, aligned);
}

KERNEL __launch_bounds__(128, 1) attention_backward_dkv_bf16(
    SHAPE_PARAMS, QKV_PARAMS(u16), SAVED_PARAMS(u16),
    void* dk, i64 dk_stride, void* dv, i64 dv_stride, int is_f32, int accumulate, int aligned
) {
    attention::Target to_k{dk, dk_stride, is_f32, accumulate}, to_v{dv, dv_stride, is_f32, accumulate};
    attention::backward_dkv_bf16<HEAD_DIM, attention::COLUMNS, 32>(SHAPE, QKV(u16), SAVED(u16), to_k, to_v, aligned);
}
