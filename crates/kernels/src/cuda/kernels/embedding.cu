// Token embeddings with learned positions. The backward pass sums the rows of each token in a fixed order: tokens are
// sorted by id first.

// out[r] = table[ids[r]] + positions[start + r % len]. A row per warp. An id in another shard gives a row of zeros; an id
// outside the vocabulary a row of NaN, which the loss will show.
template <int V, class T> DEVICE void embed(
    const u32* ids, const T* table, const T* positions, T* out, i64 row, i64 dim, i64 at, u32 first, i64 table_rows, u32 vocab
) {
    const u32 id = ids[row];
    const bool here = id >= first && id - first < table_rows, broken = id >= vocab;
    const T* from = table + (i64)(id - first) * dim;
#pragma unroll 4
    for (i64 c = (threadIdx.x & 31) * V; c < dim; c += 32 * V) {
        float x[V] = {}, p[V];
        if (here) load(from + c, x);
        if (positions) {
            load(positions + at * dim + c, p);
            for (int k = 0; k < V; k++) x[k] += p[k];
        }
        if (broken)
            for (int k = 0; k < V; k++) x[k] = not_a_number();
        store(out + row * dim + c, x);
    }
}

#define EMBED(NAME, T)                                                                                                 \
    KERNEL NAME(                                                                                                       \
        const u32* ids, const T* table, const T* positions, T* out, i64 tokens, i64 dim, u32 first, i64 table_rows,    \
        u32 vocab, i64 start, i64 len                                                                                  \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;                                        \
        if (row >= tokens) return;                                                                                     \
        const i64 at = positions ? start + row % len : 0;                                                              \
        const bool wide = dim % V == 0 && aligned<V>(table) && aligned<V>(positions) && aligned<V>(out);               \
        if (wide) embed<V>(ids, table, positions, out, row, dim, at, first, table_rows, vocab);                        \
        else embed<1>(ids, table, positions, out, row, dim, at, first, table_rows, vocab);                             \
    }
EMBED(embed_f32, float)
EMBED(embed_bf16, bf16)

// The table's row of each token; `table_rows` for ids in another shard.
KERNEL embed_keys(const u32* ids, u32* keys, i64 tokens, u32 first, u32 table_rows) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < tokens) keys[i] = ids[i] >= first && ids[i] - first < table_rows ? ids[i] - first : table_rows;
}

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;

// The first index after `i` with another key; keys are sorted.
DEVICE i64 end_of_run(const u32* keys, i64 i, i64 n) {
    const u32 key = keys[i];
    i64 low = i, step = 1;
    while (low + step < n && keys[low + step] == key) low += step, step *= 2;
    // keys[low] is the same, keys[low + step] is not.
    while (step > 1) {
        step /= 2;
        if (low + step < n && keys[low + step] == key) low += step;
    }
    return low + 1;
}

template <int V> DEVICE void write_sums(float* to, const float (&sums)[V], bool add) {
    float old[V] = {};
    if (add) load(to, old);
    for (int k = 0; k < V; k++) old[k] += sums[k];
    store(to, old);
}

// Sums of columns of the listed rows, from `begin` on, `step` apart.
template <int V, class T>
DEVICE void sum_rows(const T* dy, const u32* order, i64 begin, i64 end, i64 step, i64 dim, i64 c, float (&sums)[V]) {
    constexpr int U = 8;
    for (i64 i = begin; i < end; i += step * U) {
        Raw<T, V> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i + u * step < end) raw[u] = load_raw<V>(dy + (i64)order[i + u * step] * dim + c);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i + u * step < end) {
                float f[V];
                unpack(raw[u], f);
                for (int k = 0; k < V; k++) sums[k] += f[k];
            }
        }
    }
}

// Sums of the rows listed from `begin` to `end`, by one block.
template <int V, class T> DEVICE void sum_piece(
    const T* dy, const u32* order, i64 begin, i64 end, i64 dim, float* to, bool add
) {
    constexpr int SPAN = 32 * V;
    __shared__ float shared[WARPS][SPAN];
    if (end - begin < 16) {
        for (i64 c = threadIdx.x * V; c < dim; c += THREADS * V) {
            float sums[V] = {};
            sum_rows(dy, order, begin, end, 1, dim, c, sums);
            write_sums(to + c, sums, add);
        }
        return;
    }
    // The warps divide the rows.
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (i64 base = 0; base < dim; base += SPAN) {
        const i64 c = base + lane * V;
        float sums[V] = {};
        if (c < dim) sum_rows(dy, order, begin + warp, end, WARPS, dim, c, sums);
        for (int k = 0; k < V; k++) shared[warp][lane * V + k] = sums[k];
        __syncthreads();
        for (int k = threadIdx.x; k < SPAN && base + k < dim; k += THREADS) {
            float sum[1] = {0.0f};
            for (int w = 0; w < WARPS; w++) sum[0] += shared[w][k];
            write_sums(to + base + k, sum, add);
        }
        __syncthreads();
    }
}

// Sorted tokens are divided into pieces of this many, so that a frequent token does not keep one block busy.
constexpr i64 PIECE = 64;

// A block per token in sorted order. The first token of a run sums the run as far as the piece reaches, and so does the
// first token of a piece. A run in one piece goes to the table. Other sums go to `partial`: row 2p has the sum from the
// beginning of piece p, row 2p + 1 that of a run which begins inside it and reaches its end.
template <int V, class T> DEVICE void embed_backward(
    const u32* keys, const u32* order, const T* dy, float* dtable, float* partial, i64 tokens, i64 dim, u32 table_rows,
    bool add
) {
    const i64 i = blockIdx.x, piece = i / PIECE, next = (piece + 1) * PIECE;
    const u32 key = keys[i];
    const bool continues = i > 0 && keys[i - 1] == key, begins = i % PIECE == 0;
    if (key == table_rows || (continues && !begins)) return;
    const i64 last = min(next, tokens), end = end_of_run(keys, i, last);
    const bool goes_on = end == next && next < tokens && keys[next] == key;
    const bool whole = !continues && !goes_on;
    float* to = whole ? dtable + (i64)key * dim : partial + (2 * piece + !begins) * dim;
    sum_piece<V>(dy, order, i, end, dim, to, whole && add);
}

// Adds the sums of runs that reach over several pieces. A block per piece and span of columns; it adds the run that begins
// in its piece.
KERNEL __launch_bounds__(THREADS) embed_add_pieces(
    const u32* keys, const float* partial, float* dtable, i64 tokens, i64 dim, u32 table_rows, i64 spans, i32 add
) {
    const i64 piece = blockIdx.x / spans, begin = piece * PIECE, next = begin + PIECE;
    if (next >= tokens) return;
    const u32 key = keys[next];
    if (key == table_rows || keys[next - 1] != key || (begin > 0 && keys[begin - 1] == key)) return;
    const i64 last = (end_of_run(keys, next, tokens) - 1) / PIECE;
    const i64 c = blockIdx.x % spans * THREADS + threadIdx.x;
    if (c >= dim) return;
    float sum[1] = {partial[(2 * piece + (keys[begin] != key)) * dim + c]};
#pragma unroll 8
    for (i64 p = piece + 1; p <= last; p++) sum[0] += partial[2 * p * dim + c];
    write_sums(dtable + (i64)key * dim + c, sum, add);
}

// dpositions[start + p] = Σ dy[r] over the rows with r % len = p. A block per position.
template <int V, class T>
DEVICE void positions_backward(const T* dy, float* dpositions, i64 rows, i64 dim, i64 start, i64 len, bool add) {
    constexpr int U = 8;
    for (i64 c = threadIdx.x * V; c < dim; c += blockDim.x * V) {
        float sums[V] = {};
        for (i64 row = blockIdx.x; row < rows; row += len * U) {
            Raw<T, V> raw[U];
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (row + u * len < rows) raw[u] = load_raw<V>(dy + (row + u * len) * dim + c);
            }
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (row + u * len < rows) {
                    float f[V];
                    unpack(raw[u], f);
                    for (int k = 0; k < V; k++) sums[k] += f[k];
                }
            }
        }
        write_sums(dpositions + (start + blockIdx.x) * dim + c, sums, add);
    }
}

#define EMBED_BACKWARD(SUFFIX, T)                                                                                      \
    KERNEL __launch_bounds__(THREADS) embed_backward_##SUFFIX(                                                         \
        const u32* keys, const u32* order, const T* dy, float* dtable, float* partial, i64 tokens, i64 dim,            \
        u32 table_rows, i32 add                                                                                        \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = dim % V == 0 && aligned<V>(dy) && aligned<V>(dtable);                                        \
        if (wide) embed_backward<V>(keys, order, dy, dtable, partial, tokens, dim, table_rows, add);                   \
        else embed_backward<1>(keys, order, dy, dtable, partial, tokens, dim, table_rows, add);                        \
    }                                                                                                                  \
    KERNEL __launch_bounds__(THREADS) embed_positions_backward_##SUFFIX(                                               \
        const T* dy, float* dpositions, i64 rows, i64 dim, i64 start, i64 len, i32 add                                 \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = dim % V == 0 && aligned<V>(dy) && aligned<V>(dpositions);                                    \
        if (wide) positions_backward<V>(dy, dpositions, rows, dim, start, len, add);                                   \
        else positions_backward<1>(dy, dpositions, rows, dim, start, len, add);                                        \
    }
EMBED_BACKWARD(f32, float)
EMBED_BACKWARD(bf16, bf16)
