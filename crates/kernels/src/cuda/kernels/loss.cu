// Cross-entropy of rows of logits, for a whole vocabulary or a shard of it. Vectors are aligned by their index in the
// whole tensor, so rows of any length are read and written 16 bytes at a time; only the first and the last vector of a row
// may belong to two rows.

constexpr u32 IGNORED = 0xffffffffu;

// Smaller than any logit that matters. Finite, also in `exp_shift`, so that differences are defined.
constexpr float LOWEST = -1e38f;

// The vectors of V elements that contain a row.
template <int V> struct Span {
    i64 begin, end; // elements
    i64 first;      // vectors
    i32 count;
    bool first_whole, last_whole;
    DEVICE Span(i64 row, i64 width) : begin(row * width), end(begin + width) {
        first = begin / V;
        count = (i32)((end + V - 1) / V - first);
        first_whole = begin % V == 0;
        last_whole = end % V == 0;
    }
    // The first element of vector j.
    DEVICE i64 at(i32 j) const { return (first + j) * V; }
    // Whether vector j belongs to this row only.
    DEVICE bool whole(i32 j) const { return (j > 0 || first_whole) && (j < count - 1 || last_whole); }
    DEVICE bool has(i64 i) const { return i >= begin && i < end; }
    // The vector of a column; -1 for none.
    DEVICE i32 vector_of(i64 column) const { return column < 0 ? -1 : (i32)((begin + column) / V - first); }
};

template <int V, class T> DEVICE Raw<T, V> load_span(const T* x, const Span<V>& span, i32 j, T outside) {
    if (span.whole(j)) return load_raw<V>(x + span.at(j));
    union {
        Raw<T, V> raw;
        T each[V];
    } value;
    for (int k = 0; k < V; k++) value.each[k] = span.has(span.at(j) + k) ? x[span.at(j) + k] : outside;
    return value.raw;
}

template <int V, class T> DEVICE void store_span(T* x, const Span<V>& span, i32 j, const float (&f)[V]) {
    if (span.whole(j)) {
        store_stream<V>(x + span.at(j), f);
    } else {
        for (int k = 0; k < V; k++)
            if (span.has(span.at(j) + k)) x[span.at(j) + k] = from_float<T>(f[k]);
    }
}

// ---- softmax statistics ----

// The largest number, and the sum of exponentials relative to it.
struct Softmax {
    float max, sum;
};

template <class T> DEVICE Softmax merge(Softmax a, Softmax b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exp_for<T>(a.max - max) + b.sum * exp_for<T>(b.max - max)};
}

template <class T, int V> DEVICE void include(Softmax& s, const float (&f)[V]) {
    float max = s.max;
    for (int k = 0; k < V; k++) max = fmaxf(max, f[k]);
    s.sum *= exp_for<T>(s.max - max);
    s.max = max;
    const float shift = exp_shift<T>(max);
    for (int k = 0; k < V; k++) s.sum += exp_shifted<T>(f[k], shift);
}

// Over the block, with one barrier. `shared` has an element per warp.
template <class T> DEVICE Softmax block_softmax(Softmax s, Softmax* shared) {
    const int lane = threadIdx.x & 31;
    for (int stage = 0; stage < 2; stage++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const Softmax other = {
                __shfl_xor_sync(ALL_LANES, s.max, offset), __shfl_xor_sync(ALL_LANES, s.sum, offset)};
            s = merge<T>(s, other);
        }
        if (stage == 0) {
            if (lane == 0) shared[threadIdx.x / 32] = s;
            __syncthreads();
            s = lane < blockDim.x / 32 ? shared[lane] : Softmax{LOWEST, 0.0f};
        }
    }
    return s;
}

DEVICE float loss_of(Softmax s, float target) { return (s.max - target) + logf(s.sum); }

// A target outside the vocabulary gives a loss of NaN.
DEVICE float row_loss(Softmax s, const u32 target, i64 vocab, float logit) {
    if (target == IGNORED) return 0.0f;
    return target < vocab ? loss_of(s, logit) : not_a_number();
}

// ---- losses without gradient ----

// A row per block. Also writes the softmax statistics, unless the pointers are null.
template <int V, class T> DEVICE void losses(
    const T* logits, const u32* targets, float* losses, float* max, float* sum, i64 row, i64 vocab
) {
    __shared__ Softmax shared[32];
    const Span<V> span(row, vocab);
    Softmax s = {LOWEST, 0.0f};
#pragma unroll 4
    for (i32 j = threadIdx.x; j < span.count; j += blockDim.x) {
        float f[V];
        unpack(load_span<V>(logits, span, j, from_float<T>(-infinity())), f);
        include<T>(s, f);
    }
    s = block_softmax<T>(s, shared);
    if (threadIdx.x == 0) {
        const u32 target = targets[row];
        losses[row] = row_loss(s, target, vocab, target < vocab ? to_float(logits[span.begin + target]) : 0.0f);
        if (max) max[row] = s.max, sum[row] = s.sum;
    }
}

#define LOSSES(NAME, T)                                                                                                \
    KERNEL __launch_bounds__(512)                                                                                      \
    NAME(const T* logits, const u32* targets, float* to, float* max, float* sum, i64 rows, i64 vocab) {                \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {                                                     \
            if (aligned<WIDTH<T>>(logits)) losses<WIDTH<T>>(logits, targets, to, max, sum, row, vocab);                \
            else losses<1>(logits, targets, to, max, sum, row, vocab);                                                 \
            __syncthreads();                                                                                           \
        }                                                                                                              \
    }
LOSSES(losses_f32, float)
LOSSES(losses_bf16, bf16)

// ---- losses and gradient in one pass over memory ----

// Rows pass through shared memory in pieces. While a piece of the gradient is written, the same piece of the next row is
// on its way. A thread copies, reads and replaces only its own vectors, so that a row needs a single barrier.
constexpr int PIECES = 4;

// Two sets take turns.
struct Reduction {
    Softmax warps[32];
    float target;
    u32 unused[3];
};

template <class T> struct Rows {
    static constexpr int V = WIDTH<T>;
    const T* logits;
    Raw<T, V>* shared;
    i64 rows, vocab;
    i32 piece; // vectors

    // Starts to copy a piece of a row, if the row exists.
    DEVICE void fetch(i64 row, int p) const {
        if (row < rows) {
            const Span<V> span(row, vocab);
            const i32 end = min(span.count, (p + 1) * piece);
            for (i32 j = p * piece + threadIdx.x; j < end; j += blockDim.x) {
                if (span.whole(j)) copy_16_async(shared + j, logits + span.at(j));
                else shared[j] = load_span<V>(logits, span, j, from_float<T>(-infinity()));
            }
        }
        commit_copies();
    }

    // Adds a piece to the statistics. The thread that has the target's logit writes it.
    DEVICE void include_piece(const Span<V>& span, int p, Softmax& s, i64 target, float* target_logit) const {
        const i32 target_vector = span.vector_of(target), end = min(span.count, (p + 1) * piece);
        for (i32 j = p * piece + threadIdx.x; j < end; j += blockDim.x) {
            float f[V];
            unpack(shared[j], f);
            include<T>(s, f);
            if (j == target_vector) {
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (span.at(j) + k == span.begin + target) *target_logit = f[k];
            }
        }
    }
};

template <class T, class G> DEVICE void cross_entropy(
    const T* logits, G* out, const u32* targets, float* losses, i64 row_count, i64 vocab, float scale
) {
    extern __shared__ uint4 memory[];
    constexpr int V = WIDTH<T>;
    Reduction* reductions = (Reduction*)memory;
    Rows<T> rows = {logits, (Raw<T, V>*)(reductions + 2), row_count, vocab, 0};
    // The vectors of a piece are a multiple of the threads, so that each thread has the same ones in every row.
    const i32 most = (i32)(vocab / V) + 2, threads = blockDim.x;
    rows.piece = (most + PIECES * threads - 1) / (PIECES * threads) * threads;
    for (int p = 0; p < PIECES; p++) rows.fetch(blockIdx.x, p);
    int turn = 0;
    for (i64 row = blockIdx.x; row < row_count; row += gridDim.x, turn ^= 1) {
        const Span<V> span(row, vocab);
        const u32 target = targets[row];
        const i64 column = target < vocab ? (i64)target : -1;
        const i32 target_vector = span.vector_of(column);
        Softmax s = {LOWEST, 0.0f};
        wait_copies<3>();
        rows.include_piece(span, 0, s, column, &reductions[turn].target);
        wait_copies<2>();
        rows.include_piece(span, 1, s, column, &reductions[turn].target);
        wait_copies<1>();
        rows.include_piece(span, 2, s, column, &reductions[turn].target);
        wait_copies<0>();
        rows.include_piece(span, 3, s, column, &reductions[turn].target);
        s = block_softmax<T>(s, reductions[turn].warps);
        if (threadIdx.x == 0) losses[row] = row_loss(s, target, vocab, reductions[turn].target);
        const float factor = scale / s.sum, shift = exp_shift<T>(s.max);
        for (int p = 0; p < PIECES; p++) {
            const i32 end = min(span.count, (p + 1) * rows.piece);
            for (i32 j = p * rows.piece + threadIdx.x; j < end; j += threads) {
                float f[V] = {};
                if (target != IGNORED) {
                    unpack(rows.shared[j], f);
                    for (int k = 0; k < V; k++) f[k] = exp_shifted<T>(f[k], shift) * factor;
                }
                if (j == target_vector) {
#pragma unroll
                    for (int k = 0; k < V; k++)
                        if (span.at(j) + k == span.begin + column) f[k] -= scale;
                }
                store_span<V>(out, span, j, f);
            }
            rows.fetch(row + gridDim.x, p);
        }
    }
}

#define CROSS_ENTROPY(NAME, T, G)                                                                                      \
    KERNEL __launch_bounds__(1024)                                                                                     \
    NAME(const T* logits, G* out, const u32* targets, float* losses, i64 rows, i64 vocab, float scale) {               \
        cross_entropy(logits, out, targets, losses, rows, vocab, scale);                                               \
    }
CROSS_ENTROPY(cross_entropy_f32_f32, float, float)
CROSS_ENTROPY(cross_entropy_f32_bf16, float, bf16)
CROSS_ENTROPY(cross_entropy_bf16_f32, bf16, float)
CROSS_ENTROPY(cross_entropy_bf16_bf16, bf16, bf16)

// ---- shards of the vocabulary ----

template <int V, class T> DEVICE void largest(const T* logits, float* max, i64 row, i64 width) {
    __shared__ float shared[32];
    const Span<V> span(row, width);
    float most = -infinity();
#pragma unroll 4
    for (i32 j = threadIdx.x; j < span.count; j += blockDim.x) {
        float f[V];
        unpack(load_span<V>(logits, span, j, from_float<T>(-infinity())), f);
        for (int k = 0; k < V; k++) most = fmaxf(most, f[k]);
    }
    most = block_reduce(most, Largest{}, shared);
    if (threadIdx.x == 0) max[row] = most;
}

// Σ e^(logit - max) of the shard, and the target's logit, or zero if it is in another shard.
template <int V, class T> DEVICE void sums(
    const T* logits, const u32* targets, const float* max, float* sum, float* target_logit, i64 row, i64 width, i64 first
) {
    __shared__ float shared[32];
    const Span<V> span(row, width);
    const float most = max[row];
    float all = 0.0f;
#pragma unroll 4
    for (i32 j = threadIdx.x; j < span.count; j += blockDim.x) {
        float f[V];
        unpack(load_span<V>(logits, span, j, from_float<T>(-infinity())), f);
        for (int k = 0; k < V; k++) all += span.has(span.at(j) + k) ? exp_for<T>(f[k] - most) : 0.0f;
    }
    all = block_sum(all, shared);
    if (threadIdx.x == 0) {
        const i64 column = (i64)targets[row] - first;
        const bool here = targets[row] != IGNORED && column >= 0 && column < width;
        sum[row] = all;
        target_logit[row] = here ? to_float(logits[span.begin + column]) : 0.0f;
    }
}

KERNEL shard_losses(const float* max, const float* sum, const float* logit, const u32* targets, float* losses, i64 rows) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows) losses[row] = targets[row] == IGNORED ? 0.0f : loss_of(Softmax{max[row], sum[row]}, logit[row]);
}

// Gradient of the logits of a shard, given the statistics of all shards.
template <int V, class T, class G> DEVICE void gradient(
    const T* logits, G* out, const u32* targets, Softmax s, i64 row, i64 width, i64 first, float scale
) {
    const Span<V> span(row, width);
    const bool ignored = targets[row] == IGNORED;
    const i64 column = (i64)targets[row] - first;
    const i64 target_at = !ignored && column >= 0 && column < width ? span.begin + column : -1;
    const float factor = scale / s.sum;
#pragma unroll 2
    for (i32 j = threadIdx.x; j < span.count; j += blockDim.x) {
        float f[V];
        unpack(load_span<V>(logits, span, j, from_float<T>(-infinity())), f);
        for (int k = 0; k < V; k++) {
            f[k] = ignored ? 0.0f : exp_for<T>(f[k] - s.max) * factor;
            if (span.at(j) + k == target_at) f[k] -= scale;
        }
        store_span<V>(out, span, j, f);
    }
}

#define SHARD(SUFFIX, T)                                                                                               \
    KERNEL __launch_bounds__(512) largest_logits_##SUFFIX(const T* logits, float* max, i64 rows, i64 width) {          \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {                                                     \
            if (aligned<WIDTH<T>>(logits)) largest<WIDTH<T>>(logits, max, row, width);                                 \
            else largest<1>(logits, max, row, width);                                                                  \
            __syncthreads();                                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    KERNEL __launch_bounds__(512) logit_sums_##SUFFIX(                                                                 \
        const T* logits, const u32* targets, const float* max, float* sum, float* target, i64 rows, i64 width,         \
        i64 first                                                                                                      \
    ) {                                                                                                                \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {                                                     \
            if (aligned<WIDTH<T>>(logits)) sums<WIDTH<T>>(logits, targets, max, sum, target, row, width, first);       \
            else sums<1>(logits, targets, max, sum, target, row, width, first);                                        \
            __syncthreads();                                                                                           \
        }                                                                                                              \
    }
SHARD(f32, float)
SHARD(bf16, bf16)

#define GRADIENT(NAME, T, G)                                                                                           \
    KERNEL __launch_bounds__(512) NAME(                                                                                \
        const T* logits, G* out, const u32* targets, const float* max, const float* sum, i64 rows, i64 width,          \
        i64 first, float scale                                                                                         \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = aligned<V>(logits) && aligned<V>(out);                                                       \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {                                                     \
            const Softmax s = {max[row], sum[row]};                                                                    \
            if (wide) gradient<V>(logits, out, targets, s, row, width, first, scale);                                  \
            else gradient<1>(logits, out, targets, s, row, width, first, scale);                                       \
        }                                                                                                              \
    }
GRADIENT(logit_gradient_f32_f32, float, float)
GRADIENT(logit_gradient_f32_bf16, float, bf16)
GRADIENT(logit_gradient_bf16_f32, bf16, float)
GRADIENT(logit_gradient_bf16_bf16, bf16, bf16)
