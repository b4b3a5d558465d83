// LayerNorm and RMSNorm of the rows of (rows, dim). Without a bias, a norm is an RMSNorm: its mean is zero.

// ---- forward ----

// One element of the output, with the same bits in the forward pass and in its recomputation.
DEVICE float normalized(float x, float mean, float rstd, float gain, float bias, bool layer) {
    const float h = __fmul_rn(__fsub_rn(x, mean), rstd);
    return layer ? fmaf(h, gain, bias) : __fmul_rn(h, gain);
}

// The threads that share a row: one warp, or the whole block.
struct Group {
    bool warp;
    int index, size;
    float* shared;
    DEVICE float sum(float x) {
        if (warp) return warp_sum(x);
        const float all = block_sum(x, shared);
        shared += 32;
        return all;
    }
};

template <class T> struct NormArgs {
    T* x;
    const T* branch;
    const T *gain, *bias;
    T* out;
    float* stats;
    i64 rows;
    i32 dim;
    float eps;
};

template <int V, class T> DEVICE void write_row(const NormArgs<T>& a, i64 row, int c, const float (&x)[V], float mean, float rstd) {
    float gain[V], bias[V], y[V];
    load(a.gain + c, gain);
    if (a.bias) load(a.bias + c, bias);
    for (int k = 0; k < V; k++) y[k] = normalized(x[k], mean, rstd, gain[k], a.bias ? bias[k] : 0.0f, a.bias);
    store(a.out + row * a.dim + c, y);
}

template <class T> DEVICE void write_stats(const NormArgs<T>& a, i64 row, float mean, float rstd) {
    if (a.bias) a.stats[row * 2] = mean, a.stats[row * 2 + 1] = rstd;
    else a.stats[row] = rstd;
}

// Elements of a row that a thread keeps in registers, by the width of its loads.
template <int V> constexpr int HELD = V == 1 ? 8 : 32;

// x += branch if ADD; out = norm(x). Rows of up to `HELD<V>` elements per thread.
template <bool ADD, int V, class T> DEVICE void norm_held(const NormArgs<T>& a, Group group, i64 row) {
    constexpr int K = HELD<V> / V;
    Raw<T, V> kept[K];
    T* x = a.x + row * a.dim;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = (k * group.size + group.index) * V;
        if (c < a.dim) kept[k] = load_raw<V>(x + c);
    }
    if (ADD) {
        Raw<T, V> other[K];
        const T* branch = a.branch + row * a.dim;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = (k * group.size + group.index) * V;
            if (c < a.dim) other[k] = load_raw<V>(branch + c);
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int c = (k * group.size + group.index) * V;
            if (c < a.dim) {
                float f[V], g[V];
                unpack(kept[k], f);
                unpack(other[k], g);
                for (int i = 0; i < V; i++) f[i] += g[i];
                pack(f, kept[k]);
                store_raw(x + c, kept[k]);
            }
        }
    }
    const float per_element = 1.0f / a.dim;
    float mean = 0.0f;
    if (a.bias) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < K; k++) {
            float f[V];
            unpack(kept[k], f);
            if ((k * group.size + group.index) * V < a.dim)
                for (int i = 0; i < V; i++) sum += f[i];
        }
        mean = group.sum(sum) * per_element;
    }
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < K; k++) {
        float f[V];
        unpack(kept[k], f);
        if ((k * group.size + group.index) * V < a.dim)
            for (int i = 0; i < V; i++) squares = fmaf(f[i] - mean, f[i] - mean, squares);
    }
    squares = group.sum(squares);
    const float rstd = 1.0f / sqrtf(fmaf(squares, per_element, a.eps));
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int c = (k * group.size + group.index) * V;
        float f[V];
        unpack(kept[k], f);
        if (c < a.dim) write_row(a, row, c, f, mean, rstd);
    }
    if (group.index == 0) write_stats(a, row, mean, rstd);
}

// As above for rows of any length, which are read three times.
template <bool ADD, int V, class T> DEVICE void norm_long(const NormArgs<T>& a, Group group, i64 row) {
    const int first = group.index * V, step = group.size * V;
    T* x = a.x + row * a.dim;
    float f[V];
    if (ADD) {
        const T* branch = a.branch + row * a.dim;
        for (int c = first; c < a.dim; c += step) {
            float g[V];
            load(x + c, f);
            load(branch + c, g);
            for (int i = 0; i < V; i++) f[i] += g[i];
            store(x + c, f);
        }
    }
    const float per_element = 1.0f / a.dim;
    float mean = 0.0f;
    if (a.bias) {
        float sum = 0.0f;
        for (int c = first; c < a.dim; c += step) {
            load(x + c, f);
            for (int i = 0; i < V; i++) sum += f[i];
        }
        mean = group.sum(sum) * per_element;
    }
    float squares = 0.0f;
    for (int c = first; c < a.dim; c += step) {
        load(x + c, f);
        for (int i = 0; i < V; i++) squares = fmaf(f[i] - mean, f[i] - mean, squares);
    }
    squares = group.sum(squares);
    const float rstd = 1.0f / sqrtf(fmaf(squares, per_element, a.eps));
    for (int c = first; c < a.dim; c += step) {
        load(x + c, f);
        write_row(a, row, c, f, mean, rstd);
    }
    if (group.index == 0) write_stats(a, row, mean, rstd);
}

// A row per warp if it fits, and a row per block otherwise.
template <bool ADD, class T> DEVICE void norm(const NormArgs<T>& a) {
    __shared__ float shared[64];
    constexpr int V = WIDTH<T>;
    const bool wide = a.dim % V == 0 && aligned<V>(a.x) && aligned<V>(a.gain) && aligned<V>(a.bias)
        && aligned<V>(a.out) && aligned<V>(a.branch);
    const bool warp = a.dim <= 32 * HELD<V>;
    const int lane = threadIdx.x & 31;
    const Group group = warp ? Group{true, lane, 32, shared} : Group{false, (int)threadIdx.x, (int)blockDim.x, shared};
    const i64 row = warp ? (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32 : blockIdx.x;
    if (row >= a.rows) return;
    if (wide && a.dim <= group.size * HELD<V>) norm_held<ADD, V>(a, group, row);
    else if (wide) norm_long<ADD, V>(a, group, row);
    else if (a.dim <= group.size * HELD<1>) norm_held<ADD, 1>(a, group, row);
    else norm_long<ADD, 1>(a, group, row);
}

// The plain norm ignores `branch`.
#define NORM(NAME, T, ADD)                                                                                             \
    KERNEL __launch_bounds__(512, 1) NAME(                                                                             \
        T* x, const T* branch, const T* gain, const T* bias, T* out, float* stats, i64 rows, i32 dim, float eps        \
    ) {                                                                                                                \
        norm<ADD>(NormArgs<T>{x, ADD ? branch : nullptr, gain, bias, out, stats, rows, dim, eps});                     \
    }
NORM(norm_f32, float, false)
NORM(norm_bf16, bf16, false)
NORM(add_norm_f32, float, true)
NORM(add_norm_bf16, bf16, true)

DEVICE void read_stats(const float* stats, i64 row, bool layer, float& mean, float& rstd) {
    mean = layer ? stats[row * 2] : 0.0f;
    rstd = layer ? stats[row * 2 + 1] : stats[row];
}

template <class T> struct Recompute {
    template <int V> struct Regs { Raw<T, V> x; };
    const T *x, *gain, *bias;
    const float* stats;
    T* out;
    i64 dim;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const { r.x = load_raw<V>(x + i); }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        const i64 row = quotient(i, dim), c = i - row * dim;
        float mean, rstd, f[V], g[V], b[V];
        read_stats(stats, row, bias, mean, rstd);
        unpack(r.x, f);
        load(gain + c, g);
        if (bias) load(bias + c, b);
        for (int k = 0; k < V; k++) f[k] = normalized(f[k], mean, rstd, g[k], bias ? b[k] : 0.0f, bias);
        store<V>(out + i, f);
    }
};

#define RECOMPUTE(NAME, T)                                                                                             \
    KERNEL NAME(const T* x, const T* gain, const T* bias, const float* stats, T* out, i64 rows, i64 dim) {             \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = dim % V == 0 && aligned<V>(x) && aligned<V>(gain) && aligned<V>(bias) && aligned<V>(out);    \
        over<V, 2>(Recompute<T>{x, gain, bias, stats, out, dim}, rows * dim, wide);                                    \
    }
RECOMPUTE(norm_recompute_f32, float)
RECOMPUTE(norm_recompute_bf16, bf16)

// ---- backward ----
// dx += rstd (g - mean(g) - h mean(g h)), where h = (x - mean) rstd and g = dy gain; dgain = Σ dy h; dbias = Σ dy.

template <class T> struct BackwardArgs {
    const T *x, *gain;
    const float* stats;
    const T* dy;
    T* dx;
    float* parts; // (blocks, 3, dim): sums of dy h, of dy, and of the new dx
    i64 rows;
    i32 dim;
    i32 layer;
    i32 width; // threads of a row
};

// Groups of `width` threads each take R rows at a time; each thread has V columns. The sums of columns stay in registers
// until all rows are done. Then they are added up over the groups, in the dynamic shared memory: (groups, 3, dim).
constexpr int MOST_GROUPS = 8;

template <int V, int R, bool GROUPS, class T> DEVICE void norm_backward(const BackwardArgs<T>& a) {
    extern __shared__ float totals[];
    __shared__ float all_shared[GROUPS ? MOST_GROUPS : 1][2][2 * R][32];
    const int width = GROUPS ? a.width : (int)blockDim.x;
    const int group = GROUPS ? threadIdx.x / width : 0, groups = GROUPS ? blockDim.x / width : 1;
    const int thread = threadIdx.x - group * width;
    const int c = thread * V, lane = thread & 31, warp = thread / 32, warps = width / 32;
    const bool on = c < a.dim;
    float(&shared)[2][2 * R][32] = all_shared[group];
    const float per_element = 1.0f / a.dim;
    float gain[V] = {}, dgain[V] = {}, dbias[V] = {}, sums[V] = {};
    if (on) load(a.gain + c, gain);
    int turn = 0;
    const i64 rows_of_block = groups * R, step = gridDim.x * rows_of_block;
    // All groups take part in every round, also those without rows in the last one: racecheck loses track of barriers if
    // the threads of a block have passed different numbers of them.
    for (i64 round = blockIdx.x * rows_of_block; round < a.rows; round += step, turn ^= 1) {
        const i64 first = round + group * R;
        Raw<T, V> x[R], dy[R], dx[R];
        float mean[R], rstd[R], both[2 * R];
#pragma unroll
        for (int r = 0; r < R; r++) {
            const i64 at = (first + r) * a.dim + c;
            if (on && first + r < a.rows) {
                dy[r] = load_raw<V>(a.dy + at);
                x[r] = load_raw<V>(a.x + at);
                // With a thousand threads, registers are scarce and latency is hidden.
                if (R > 1) dx[r] = load_raw<V>(a.dx + at);
            }
            mean[r] = rstd[r] = 0.0f;
            if (first + r < a.rows) read_stats(a.stats, first + r, a.layer, mean[r], rstd[r]);
        }
#pragma unroll
        for (int r = 0; r < R; r++) {
            both[2 * r] = both[2 * r + 1] = 0.0f;
            if (on && first + r < a.rows) {
                float f[V], d[V];
                unpack(x[r], f);
                unpack(dy[r], d);
                for (int k = 0; k < V; k++) {
                    const float h = (f[k] - mean[r]) * rstd[r], g = d[k] * gain[k];
                    dgain[k] = fmaf(d[k], h, dgain[k]);
                    dbias[k] += d[k];
                    both[2 * r] += g;
                    both[2 * r + 1] = fmaf(g, h, both[2 * r + 1]);
                }
            }
        }
        // Two buffers take turns, so that one barrier per round is enough.
#pragma unroll
        for (int i = 0; i < 2 * R; i++) {
            both[i] = warp_sum(both[i]);
            if (lane == 0) shared[turn][i][warp] = both[i];
        }
        if (GROUPS) barrier(1 + group, width);
        else __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * R; i++) both[i] = warp_sum(lane < warps ? shared[turn][i][lane] : 0.0f) * per_element;
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (on && first + r < a.rows) {
                const float direct = a.layer ? both[2 * r] : 0.0f, along = both[2 * r + 1];
                float f[V], d[V], out[V];
                if (R == 1) dx[r] = load_raw<V>(a.dx + (first + r) * a.dim + c);
                unpack(x[r], f);
                unpack(dy[r], d);
                unpack(dx[r], out);
                for (int k = 0; k < V; k++) {
                    const float h = (f[k] - mean[r]) * rstd[r];
                    out[k] += rstd[r] * (fmaf(d[k], gain[k], -direct) - h * along);
                    sums[k] += out[k];
                }
                store(a.dx + (first + r) * a.dim + c, out);
            }
        }
    }
    float* part = a.parts + (i64)blockIdx.x * 3 * a.dim;
    float* own = groups > 1 ? totals + group * 3 * a.dim : part;
    if (on) {
        for (int k = 0; k < V; k++) {
            own[c + k] = dgain[k];
            own[a.dim + c + k] = dbias[k];
            own[2 * a.dim + c + k] = sums[k];
        }
    }
    if (groups == 1) return;
    __syncthreads();
    for (int i = threadIdx.x; i < 3 * a.dim; i += blockDim.x) {
        float sum = totals[i];
        for (int g = 1; g < groups; g++) sum += totals[g * 3 * a.dim + i];
        part[i] = sum;
    }
}

// A row per block, for rows of any length. The sums of columns are added to the block's part row by row.
template <class T> DEVICE void norm_backward_long(const BackwardArgs<T>& a) {
    __shared__ float shared[64];
    float* part = a.parts + (i64)blockIdx.x * 3 * a.dim;
    for (int c = threadIdx.x; c < a.dim; c += blockDim.x) part[c] = part[a.dim + c] = part[2 * (i64)a.dim + c] = 0.0f;
    for (i64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const T *x = a.x + row * a.dim, *dy = a.dy + row * a.dim;
        T* dx = a.dx + row * a.dim;
        float mean, rstd, direct = 0.0f, along = 0.0f;
        read_stats(a.stats, row, a.layer, mean, rstd);
        for (int c = threadIdx.x; c < a.dim; c += blockDim.x) {
            const float d = to_float(dy[c]), g = d * to_float(a.gain[c]), h = (to_float(x[c]) - mean) * rstd;
            direct += g;
            along = fmaf(g, h, along);
            part[c] = fmaf(d, h, part[c]);
            part[a.dim + c] += d;
        }
        direct = block_sum(direct, shared) / a.dim;
        along = block_sum(along, shared + 32) / a.dim;
        if (!a.layer) direct = 0.0f;
        for (int c = threadIdx.x; c < a.dim; c += blockDim.x) {
            const float g = to_float(dy[c]) * to_float(a.gain[c]), h = (to_float(x[c]) - mean) * rstd;
            const float out = to_float(dx[c]) + rstd * (g - direct - h * along);
            dx[c] = from_float<T>(out);
            part[2 * (i64)a.dim + c] += out;
        }
        __syncthreads();
    }
}

// `narrow` has one column per thread, for widths and addresses that do not allow vectors.
#define NORM_BACKWARD(SUFFIX, T)                                                                                       \
    KERNEL __launch_bounds__(1024 / sizeof(T)) norm_backward_4_rows_##SUFFIX(BACKWARD_PARAMETERS(T)) {                 \
        norm_backward<8, 4, true>(BackwardArgs<T>{x, gain, stats, dy, dx, parts, rows, dim, layer, width});                  \
    }                                                                                                                  \
    KERNEL __launch_bounds__(512) norm_backward_2_rows_##SUFFIX(BACKWARD_PARAMETERS(T)) {                              \
        norm_backward<8, 2, false>(BackwardArgs<T>{x, gain, stats, dy, dx, parts, rows, dim, layer, width});                  \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024) norm_backward_narrow_##SUFFIX(BACKWARD_PARAMETERS(T)) {                             \
        norm_backward<1, 4, false>(BackwardArgs<T>{x, gain, stats, dy, dx, parts, rows, dim, layer, width});                  \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024) norm_backward_long_##SUFFIX(BACKWARD_PARAMETERS(T)) {                               \
        norm_backward_long(BackwardArgs<T>{x, gain, stats, dy, dx, parts, rows, dim, layer, width});                   \
    }
#define BACKWARD_PARAMETERS(T)                                                                                         \
    const T *x, const T *gain, const float *stats, const T *dy, T *dx, float *parts, i64 rows, i32 dim, i32 layer,     \
        i32 width
NORM_BACKWARD(f32, float)
NORM_BACKWARD(bf16, bf16)

// In f32, a thousand threads have too few registers for 8 columns each.
KERNEL __launch_bounds__(1024) norm_backward_1_row_bf16(BACKWARD_PARAMETERS(bf16)) {
    norm_backward<8, 1, false>(BackwardArgs<bf16>{x, gain, stats, dy, dx, parts, rows, dim, layer, width});
}

// Gradients of gain and bias, and the sums of the columns of dx, from the blocks' parts. A null pointer is skipped.
KERNEL __launch_bounds__(1024) norm_backward_sums(
    const float* parts, float* dgain, float* dbias, float* dx_sums, i64 blocks, i64 dim, i32 add
) {
    const int which = blockIdx.y;
    float* out = which == 0 ? dgain : which == 1 ? dbias : dx_sums;
    if (!out) return;
    const i64 column = (i64)blockIdx.x * 32 + (threadIdx.x & 31);
    const float sum = sum_parts(parts + which * dim + (i64)blockIdx.x * 32, blocks, 3 * dim, column < dim);
    if (threadIdx.x < 32 && column < dim) out[column] = add ? out[column] + sum : sum;
}
