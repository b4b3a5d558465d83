// Reductions over whole tensors and over rows. The order of additions depends only on the shape.

// ---- sums of all elements ----

// Sums 4 runs of V terms in f64: one sum per block.
template <int V, class Term, class T> DEVICE double sum_terms(const T* x, i64 n, Term term) {
    constexpr int U = 4;
    const i64 vectors = n / V, step = (i64)gridDim.x * blockDim.x * U;
    double sum = 0.0;
    for (i64 at = (i64)blockIdx.x * blockDim.x * U + threadIdx.x; at < vectors; at += step) {
        Raw<T, V> raw[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const i64 i = at + u * (i64)blockDim.x;
            if (i < vectors) raw[u] = load_raw<V>(x + i * V);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (at + u * (i64)blockDim.x < vectors) {
                float f[V];
                unpack(raw[u], f);
                sum += term(f);
            }
        }
    }
    const i64 rest = vectors * V + (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (rest < n) {
        float f[1];
        load(x + rest, f);
        sum += term(f);
    }
    return sum;
}

struct Plain {
    template <int V> DEVICE double operator()(const float (&f)[V]) const {
        double sum = 0.0;
        for (int k = 0; k < V; k++) sum += (double)f[k];
        return sum;
    }
};

struct Squares {
    template <int V> DEVICE double operator()(const float (&f)[V]) const {
        float sum = 0.0f;
        for (int k = 0; k < V; k++) sum = fmaf(f[k], f[k], sum);
        return (double)sum;
    }
};

struct NonFinite {
    template <int V> DEVICE double operator()(const float (&f)[V]) const {
        u32 count = 0;
        for (int k = 0; k < V; k++) count += (__float_as_uint(f[k]) & 0x7f800000u) == 0x7f800000u;
        return (double)count;
    }
};

#define SUM_OF(NAME, T, TERM)                                                                                          \
    KERNEL __launch_bounds__(256) NAME(const T* x, double* sums, i64 n) {                                              \
        __shared__ double shared[8];                                                                                   \
        const double sum = aligned<WIDTH<T>>(x) ? sum_terms<WIDTH<T>>(x, n, TERM{}) : sum_terms<1>(x, n, TERM{});      \
        const double all = block_sum(sum, shared);                                                                     \
        if (threadIdx.x == 0) sums[blockIdx.x] = all;                                                                  \
    }
SUM_OF(sum_f32, float, Plain)
SUM_OF(sum_of_squares_f32, float, Squares)
SUM_OF(sum_of_squares_bf16, bf16, Squares)
SUM_OF(count_non_finite_f32, float, NonFinite)
SUM_OF(count_non_finite_bf16, bf16, NonFinite)

// The sum of n numbers, by one block.
KERNEL __launch_bounds__(1024) sum_f64(const double* x, double* out, i64 n) {
    __shared__ double shared[32];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *out = sum;
}

// ---- checksums ----

// Adds to *sum a product of the bits of each element and a number that depends on its index, as on the CPU. Integers
// give the same sum in every order.
template <class U> DEVICE void checksum(const U* x, unsigned long long* sum, i64 n) {
    unsigned long long mine = 0;
    const i64 step = (i64)gridDim.x * blockDim.x;
#pragma unroll 4
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const u32 mix = (u32)i * 0x9e3779b1u;
        mine += (unsigned long long)(x[i] ^ mix) * (mix | 1u);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, lanes);
    if ((threadIdx.x & 31) == 0) atomicAdd(sum, mine);
}
KERNEL checksum_f32(const u32* x, unsigned long long* sum, i64 n) { checksum(x, sum, n); }
KERNEL checksum_bf16(const unsigned short* x, unsigned long long* sum, i64 n) { checksum(x, sum, n); }

// The low bits of a checksum, as many as a double holds exactly.
KERNEL checksum_low_bits(const unsigned long long* sum, double* out, i32 bits) {
    *out = (double)(*sum & ((1ull << bits) - 1));
}

// ---- sums of columns ----

// Sums the rows of x (matrices, rows, n). Each block sums every gridDim.y-th group of 8 rows of 32 V columns, into its
// row of `parts` (matrices, gridDim.y, n), or into `out` (matrices, n) if there is one part.
template <int V, class T> DEVICE void column_sums(const T* x, float* parts, float* out, i64 rows, i64 n, bool add) {
    constexpr int U = 4, SPAN = 32 * V;
    __shared__ float shared[8][SPAN];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    x += blockIdx.z * rows * n;
    for (i64 base = (i64)blockIdx.x * SPAN; base < n; base += (i64)gridDim.x * SPAN) {
        const i64 column = base + lane * V, step = (i64)gridDim.y * 8;
        float sums[V] = {};
        if (column < n) {
            for (i64 row = (i64)blockIdx.y * 8 + warp; row < rows; row += step * U) {
                Raw<T, V> raw[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (row + u * step < rows) raw[u] = load_raw<V>(x + (row + u * step) * n + column);
                }
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (row + u * step < rows) {
                        float f[V];
                        unpack(raw[u], f);
                        for (int k = 0; k < V; k++) sums[k] += f[k];
                    }
                }
            }
        }
        for (int k = 0; k < V; k++) shared[warp][lane * V + k] = sums[k];
        __syncthreads();
        for (int c = threadIdx.x; c < SPAN && base + c < n; c += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < 8; w++) sum += shared[w][c];
            if (gridDim.y == 1) {
                float* to = out + blockIdx.z * n + base + c;
                *to = add ? *to + sum : sum;
            } else {
                parts[((i64)blockIdx.z * gridDim.y + blockIdx.y) * n + base + c] = sum;
            }
        }
        __syncthreads();
    }
}

#define COLUMN_SUMS(NAME, T)                                                                                           \
    KERNEL __launch_bounds__(256)                                                                                      \
    NAME(const T* x, float* parts, float* out, i64 rows, i64 n, i32 add) {                                             \
        if (aligned<WIDTH<T>>(x) && n % WIDTH<T> == 0) column_sums<WIDTH<T>>(x, parts, out, rows, n, add);             \
        else column_sums<1>(x, parts, out, rows, n, add);                                                              \
    }
COLUMN_SUMS(column_sums_f32, float)
COLUMN_SUMS(column_sums_bf16, bf16)

// Adds the rows of `parts` (matrices, count, n).
KERNEL __launch_bounds__(1024) add_parts(const float* parts, float* out, i64 count, i64 n, i32 add) {
    const i64 column = (i64)blockIdx.x * 32 + (threadIdx.x & 31);
    const float* first = parts + blockIdx.z * count * n + (i64)blockIdx.x * 32;
    const float sum = sum_parts(first, count, n, column < n);
    if (threadIdx.x < 32 && column < n) {
        float* to = out + blockIdx.z * n + column;
        *to = add ? *to + sum : sum;
    }
}
