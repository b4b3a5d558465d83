// Attention in f32. HEAD_DIM is 64, 128 or 256: smaller heads are padded with zeros in shared memory.
//
// 16 × 16 threads; each computes T / 16 rows of a tile of T × T scores and of T × D results.

namespace attention {

constexpr int F32_THREADS = 256;

// Copies T rows to shared memory, with zeros after `rows` rows and `dim` columns.
template <int D, int T>
__device__ void load_f32(float* to, const float* from, i64 stride, int rows, int dim) {
    for (int i = threadIdx.x; i < T * D; i += F32_THREADS) {
        int row = i / D, column = i % D;
        to[row * (D + 4) + column] = row < rows && column < dim ? from[row * stride + column] : 0.0f;
    }
}

// c = a · bᵀ, (T, D) · (T, D)ᵀ. A thread has rows ty * R + i and columns tx + 16 j.
template <int D, int T>
__device__ void scores_f32(const float* a, const float* b, float (&c)[T / 16][T / 16]) {
    constexpr int R = T / 16;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) c[i][j] = 0.0f;
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
        float4 x[R], y[R];
#pragma unroll
        for (int i = 0; i < R; i++) {
            x[i] = *(const float4*)(a + (ty * R + i) * (D + 4) + d);
            y[i] = *(const float4*)(b + (tx + 16 * i) * (D + 4) + d);
        }
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < R; j++) {
                c[i][j] += x[i].x * y[j].x;
                c[i][j] += x[i].y * y[j].y;
                c[i][j] += x[i].z * y[j].z;
                c[i][j] += x[i].w * y[j].w;
            }
    }
}

// sums += p · v, (T, T) · (T, D). A thread has rows ty * R + i and columns 64 j + 4 tx + 0..4.
template <int D, int T>
__device__ void add_product_f32(const float* p, const float* v, float (&sums)[T / 16][D / 16]) {
    constexpr int R = T / 16;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 1
    for (int k = 0; k < T; k += 4) {
        float x[R][4];
#pragma unroll
        for (int i = 0; i < R; i++) {
            float4 four = *(const float4*)(p + (ty * R + i) * (T + 4) + k);
            x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int j = 0; j < D / 64; j++) {
                float4 y = *(const float4*)(v + (k + n) * (D + 4) + 64 * j + 4 * tx);
#pragma unroll
                for (int i = 0; i < R; i++) {
                    sums[i][4 * j] += x[i][n] * y.x;
                    sums[i][4 * j + 1] += x[i][n] * y.y;
                    sums[i][4 * j + 2] += x[i][n] * y.z;
                    sums[i][4 * j + 3] += x[i][n] * y.w;
                }
            }
    }
}

// Writes a thread's elements of a (T, T) tile to shared memory.
template <int T>
__device__ void put_f32(float* to, const float (&tile)[T / 16][T / 16]) {
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < T / 16; i++)
#pragma unroll
        for (int j = 0; j < T / 16; j++) to[(ty * (T / 16) + i) * (T + 4) + tx + 16 * j] = tile[i][j];
}

// Stores factor * sums as rows first_row.. of a gradient, from `column` on.
template <int D, int T>
__device__ void store_f32(
    const Target& to, i64 first_row, int rows, i64 column, int dim, float factor, const float (&sums)[T / 16][D / 16]
) {
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int i = 0; i < T / 16; i++) {
        int row = ty * (T / 16) + i;
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            int d = j / 4 * 64 + 4 * tx + j % 4;
            if (row < rows && d < dim) to.store(first_row + row, column + d, factor * sums[i][j]);
        }
    }
}

template <int D, int T>
__device__ void forward_f32(
    const Shape& shape, const Qkv<float>& in, const Target& out, float* lse
) {
    constexpr int R = T / 16;
    extern __shared__ float4 shared[];
    float* queries = (float*)shared;       // (T, D + 4)
    float* keys = queries + T * (D + 4);   // (T, D + 4), keys and then values
    float* probs = keys + T * (D + 4);     // (T, T + 4)
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int tiles = tiles_of(shape.q_len, T), dim = shape.head_dim;
    Place place(shape.heads, tiles);
    // The longest rows first.
    int first = (tiles - 1 - place.tile) * T, rows = min(T, shape.q_len - first);
    i64 token = place.batch * shape.q_len + first;
    const float* q = in.q + token * in.q_stride + (i64)place.head * dim;
    i64 kv_column = (i64)(place.head / shape.group) * dim;
    const float* k = in.k + place.batch * shape.k_len * in.k_stride + kv_column;
    const float* v = in.v + place.batch * shape.k_len * in.v_stride + kv_column;

    float top[R], total[R], sums[R][D / 16];
#pragma unroll
    for (int i = 0; i < R; i++) {
        top[i] = INITIAL_MAX, total[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 16; j++) sums[i][j] = 0.0f;
    }
    load_f32<D, T>(queries, q, in.q_stride, rows, dim);
    int end = shape.visible_keys(first + rows - 1);
    for (int key = 0; key < end; key += T) {
        int count = min(T, shape.k_len - key);
        __syncthreads();
        load_f32<D, T>(keys, k + key * in.k_stride, in.k_stride, count, dim);
        __syncthreads();
        float score[R][R];
        scores_f32<D, T>(queries, keys, score);
#pragma unroll
        for (int i = 0; i < R; i++) {
            int visible = shape.visible_keys(first + ty * R + i) - key;
            float most = top[i];
#pragma unroll
            for (int j = 0; j < R; j++) {
                score[i][j] = tx + 16 * j < visible ? score[i][j] * (shape.scale * LOG2_E) : -infinity();
                most = fmaxf(most, score[i][j]);
            }
#pragma unroll
            for (int lane = 8; lane > 0; lane /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lane));
            float rescale = exp2f(top[i] - most);
            top[i] = most;
            total[i] *= rescale;
#pragma unroll
            for (int j = 0; j < D / 16; j++) sums[i][j] *= rescale;
#pragma unroll
            for (int j = 0; j < R; j++) {
                score[i][j] = exp2f(score[i][j] - most);
                total[i] += score[i][j];
            }
        }
        put_f32<T>(probs, score);
        __syncthreads();
        load_f32<D, T>(keys, v + key * in.v_stride, in.v_stride, count, dim);
        __syncthreads();
        add_product_f32<D, T>(probs, keys, sums);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
#pragma unroll
        for (int lane = 8; lane > 0; lane /= 2) total[i] += __shfl_xor_sync(ALL_LANES, total[i], lane);
        int row = ty * R + i;
        bool sees = shape.visible_keys(first + row) > 0;
        float factor = sees ? 1.0f / total[i] : 0.0f;
#pragma unroll
        for (int j = 0; j < D / 16; j++) sums[i][j] = sees ? sums[i][j] * factor : 0.0f;
        if (tx == 0 && row < rows)
            lse[(place.batch * shape.heads + place.head) * shape.q_len + first + row] =
                sees ? (top[i] + log2f(total[i])) * LN_2 : -infinity();
    }
    store_f32<D, T>(out, token, rows, (i64)place.head * dim, dim, 1.0f, sums);
}

template <int D, int T>
__device__ void backward_dq_f32(
    const Shape& shape, const Qkv<float>& in, const Saved<float>& saved, const Target& dq
) {
    constexpr int R = T / 16;
    extern __shared__ float4 shared[];
    float* queries = (float*)shared;       // (T, D + 4)
    float* douts = queries + T * (D + 4);  // (T, D + 4)
    float* keys = douts + T * (D + 4);     // (T, D + 4)
    float* values = keys + T * (D + 4);    // (T, D + 4)
    float* dscores = values + T * (D + 4); // (T, T + 4)
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int tiles = tiles_of(shape.q_len, T), dim = shape.head_dim;
    Place place(shape.heads, tiles);
    int first = (tiles - 1 - place.tile) * T, rows = min(T, shape.q_len - first);
    i64 token = place.batch * shape.q_len + first, width = (i64)shape.heads * dim, column = (i64)place.head * dim;
    i64 kv_column = (i64)(place.head / shape.group) * dim;
    const float* k = in.k + place.batch * shape.k_len * in.k_stride + kv_column;
    const float* v = in.v + place.batch * shape.k_len * in.v_stride + kv_column;
    load_f32<D, T>(queries, in.q + token * in.q_stride + column, in.q_stride, rows, dim);
    load_f32<D, T>(douts, saved.dout + token * width + column, width, rows, dim);

    float log_sum[R], mean[R], sums[R][D / 16];
#pragma unroll
    for (int i = 0; i < R; i++) {
        int row = ty * R + i;
        log_sum[i] = infinity(), mean[i] = 0.0f;
        if (row < rows) {
            log_sum[i] = log2_sum(saved.lse[(place.batch * shape.heads + place.head) * shape.q_len + first + row]);
            mean[i] = saved.delta[(token + row) * shape.heads + place.head];
        }
#pragma unroll
        for (int j = 0; j < D / 16; j++) sums[i][j] = 0.0f;
    }
    int end = shape.visible_keys(first + rows - 1);
    for (int key = 0; key < end; key += T) {
        int count = min(T, shape.k_len - key);
        __syncthreads();
        load_f32<D, T>(keys, k + key * in.k_stride, in.k_stride, count, dim);
        load_f32<D, T>(values, v + key * in.v_stride, in.v_stride, count, dim);
        __syncthreads();
        float score[R][R], dprob[R][R];
        scores_f32<D, T>(queries, keys, score);
        scores_f32<D, T>(douts, values, dprob);
#pragma unroll
        for (int i = 0; i < R; i++) {
            int visible = shape.visible_keys(first + ty * R + i) - key;
#pragma unroll
            for (int j = 0; j < R; j++) {
                float prob = exp2f(score[i][j] * (shape.scale * LOG2_E) - log_sum[i]);
                score[i][j] = tx + 16 * j < visible ? prob * (dprob[i][j] - mean[i]) : 0.0f;
            }
        }
        put_f32<T>(dscores, score);
        __syncthreads();
        add_product_f32<D, T>(dscores, keys, sums);
    }
    store_f32<D, T>(dq, token, rows, column, dim, shape.scale, sums);
}

template <int D, int T>
__device__ void backward_dkv_f32(
    const Shape& shape, const Qkv<float>& in, const Saved<float>& saved, const Target& dk, const Target& dv
) {
    constexpr int R = T / 16;
    extern __shared__ float4 shared[];
    float* keys = (float*)shared;          // (T, D + 4)
    float* values = keys + T * (D + 4);    // (T, D + 4)
    float* queries = values + T * (D + 4); // (T, D + 4)
    float* douts = queries + T * (D + 4);  // (T, D + 4)
    float* tile = douts + T * (D + 4);     // (T, T + 4)
    float* log_sum = tile + T * (T + 4);   // (T)
    float* mean = log_sum + T;             // (T)
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int dim = shape.head_dim;
    i64 width = (i64)shape.heads * dim;
    Place place(shape.heads / shape.group, tiles_of(shape.k_len, T));
    int first = place.tile * T, count = min(T, shape.k_len - first);
    i64 token = place.batch * shape.k_len + first, column = (i64)place.head * dim;
    load_f32<D, T>(keys, in.k + token * in.k_stride + column, in.k_stride, count, dim);
    load_f32<D, T>(values, in.v + token * in.v_stride + column, in.v_stride, count, dim);

    float dkeys[R][D / 16], dvalues[R][D / 16];
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < D / 16; j++) dkeys[i][j] = dvalues[i][j] = 0.0f;
    int start = shape.first_query(first) / T * T;
    for (int head = place.head * shape.group; head < (place.head + 1) * shape.group; head++) {
        for (int query = start; query < shape.q_len; query += T) {
            int rows = min(T, shape.q_len - query);
            i64 from = place.batch * shape.q_len + query;
            __syncthreads();
            load_f32<D, T>(queries, in.q + from * in.q_stride + (i64)head * dim, in.q_stride, rows, dim);
            load_f32<D, T>(douts, saved.dout + from * width + (i64)head * dim, width, rows, dim);
            for (int i = threadIdx.x; i < T; i += F32_THREADS) {
                bool real = i < rows;
                i64 at = (place.batch * shape.heads + head) * shape.q_len + query + i;
                log_sum[i] = real ? log2_sum(saved.lse[at]) : infinity();
                mean[i] = real ? saved.delta[(from + i) * shape.heads + head] : 0.0f;
            }
            __syncthreads();
            float prob[R][R], dscore[R][R];
            scores_f32<D, T>(keys, queries, prob);
            scores_f32<D, T>(values, douts, dscore);
#pragma unroll
            for (int j = 0; j < R; j++) {
                int lane = tx + 16 * j, visible = shape.visible_keys(query + lane) - first;
#pragma unroll
                for (int i = 0; i < R; i++) {
                    float value = exp2f(prob[i][j] * (shape.scale * LOG2_E) - log_sum[lane]);
                    prob[i][j] = ty * R + i < visible ? value : 0.0f;
                    dscore[i][j] = ty * R + i < visible ? value * (dscore[i][j] - mean[lane]) : 0.0f;
                }
            }
            put_f32<T>(tile, prob);
            __syncthreads();
            add_product_f32<D, T>(tile, douts, dvalues);
            __syncthreads();
            put_f32<T>(tile, dscore);
            __syncthreads();
            add_product_f32<D, T>(tile, queries, dkeys);
        }
    }
    store_f32<D, T>(dk, token, count, column, dim, shape.scale, dkeys);
    store_f32<D, T>(dv, token, count, column, dim, 1.0f, dvalues);
}

constexpr int TILE = HEAD_DIM > 128 ? 32 : 64;

} // namespace attention

KERNEL __launch_bounds__(256, 1) attention_forward_f32(
    SHAPE_PARAMS, QKV_PARAMS(float), void* out, i64 out_stride, int out_f32, float* lse, int aligned
) {
    attention::Target target{out, out_stride, 1, 0};
    attention::forward_f32<HEAD_DIM, attention::TILE>(SHAPE, QKV(float), target, lse);
}

KERNEL __launch_bounds__(256, 1) attention_backward_dq_f32(
    SHAPE_PARAMS, QKV_PARAMS(float), SAVED_PARAMS(float), void* dq,
    i64 dq_stride, int is_f32, int accumulate, int aligned
) {
    attention::Target target{dq, dq_stride, 1, accumulate};
    attention::backward_dq_f32<HEAD_DIM, attention::TILE>(SHAPE, QKV(float), SAVED(float), target);
}

KERNEL __launch_bounds__(256, 1) attention_backward_dkv_f32(
    SHAPE_PARAMS, QKV_PARAMS(float), SAVED_PARAMS(float), void* dk,
    i64 dk_stride, void* dv, i64 dv_stride, int is_f32, int accumulate, int aligned
) {
    attention::Target to_k{dk, dk_stride, 1, accumulate}, to_v{dv, dv_stride, 1, accumulate};
    attention::backward_dkv_f32<HEAD_DIM, attention::TILE>(SHAPE, QKV(float), SAVED(float), to_k, to_v);
}
