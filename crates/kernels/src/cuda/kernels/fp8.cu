// Casts of bf16 matrices to fp8: e4m3 for activations and weights, e5m2 for gradients. Elements are multiplied by the
// scale of their matrix, rounded to nearest (ties to even), and saturate. The cast can apply an activation function to
// its input, so that its output is never stored in bf16.

// A block casts tiles of this many rows and columns.
constexpr int TILE = 128;

// Threads of a tile's row, with 8 elements each, and rows of threads.
constexpr int ACROSS = TILE / 8, DOWN = 256 / ACROSS;

// ---- inputs ----
// `read` loads 8 elements of the matrix, `get` computes them.

struct Whole {
    struct Regs { Raw<bf16, 8> x; };
    const bf16 *x, *unused;
    DEVICE void read(i64 row, i64 column, i64 cols, Regs& r) const { r.x = load_raw<8>(x + row * cols + column); }
    DEVICE void get(const Regs& r, float (&f)[8]) const { unpack(r.x, f); }
};

// GELU of x.
struct GeluOf {
    struct Regs { Raw<bf16, 8> x; };
    const bf16 *x, *unused;
    DEVICE void read(i64 row, i64 column, i64 cols, Regs& r) const { r.x = load_raw<8>(x + row * cols + column); }
    DEVICE void get(const Regs& r, float (&f)[8]) const {
        unpack(r.x, f);
        for (int k = 0; k < 8; k++) f[k] *= gelu_sigmoid<bf16>(f[k]);
    }
};

// The gradient of GELU's input x, from that of its output d.
struct GeluGradientOf {
    struct Regs { Raw<bf16, 8> x, d; };
    const bf16 *x, *d;
    DEVICE void read(i64 row, i64 column, i64 cols, Regs& r) const {
        r.x = load_raw<8>(x + row * cols + column);
        r.d = load_raw<8>(d + row * cols + column);
    }
    DEVICE void get(const Regs& r, float (&f)[8]) const {
        float x[8];
        unpack(r.x, x);
        unpack(r.d, f);
        for (int k = 0; k < 8; k++) f[k] *= gelu_slope<bf16>(x[k]);
    }
};

// silu(gate) up, where each row of x holds gate, then up.
struct SwigluOf {
    struct Regs { Raw<bf16, 8> gate, up; };
    const bf16 *x, *unused;
    DEVICE void read(i64 row, i64 column, i64 cols, Regs& r) const {
        const bf16* gate = x + 2 * row * cols + column;
        r.gate = load_raw<8>(gate);
        r.up = load_raw<8>(gate + cols);
    }
    DEVICE void get(const Regs& r, float (&f)[8]) const {
        float up[8];
        unpack(r.gate, f);
        unpack(r.up, up);
        for (int k = 0; k < 8; k++) f[k] *= sigmoid<bf16>(f[k]) * up[k];
    }
};

// ---- scales ----

DEVICE float largest(const float (&f)[8], float most) {
    for (int k = 0; k < 8; k++) most = fmaxf(most, fabsf(f[k]));
    return most;
}

// The scale that maps `amax` to the largest number of the format, after its inverse. The bound keeps the inverse of a
// matrix of tiny numbers normal.
DEVICE void store_scale(float amax, float max, float* scale) {
    const float ratio = amax == 0.0f ? 1.0f : fminf(max / amax, 0x1p+100f);
    scale[0] = 1.0f / ratio;
    scale[1] = ratio;
}

// The scale of a matrix from its largest absolute value. `state` holds the bits of that value and the number of
// finished blocks; both are zero before and after.
template <class From>
DEVICE void amax(const From& from, u32* state, float* scale, float max, i64 rows, i64 cols) {
    constexpr int U = 4;
    __shared__ float shared[8];
    const i64 across = cols / 8, vectors = rows * across, step = (i64)gridDim.x * blockDim.x * U;
    float most = 0.0f;
    for (i64 at = (i64)blockIdx.x * blockDim.x * U + threadIdx.x; at < vectors; at += step) {
        typename From::Regs regs[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const i64 i = at + u * (i64)blockDim.x;
            const i64 row = quotient(i, across);
            if (i < vectors) from.read(row, (i - row * across) * 8, cols, regs[u]);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (at + u * (i64)blockDim.x < vectors) {
                float f[8];
                from.get(regs[u], f);
                most = largest(f, most);
            }
        }
    }
    most = block_reduce(most, Largest{}, shared);
    if (threadIdx.x != 0) return;
    // Numbers that are not negative are ordered as their bits.
    atomicMax(state, __float_as_uint(most));
    __threadfence();
    if (atomicAdd(state + 1, 1u) == gridDim.x - 1) {
        store_scale(__uint_as_float(atomicExch(state, 0u)), max, scale);
        state[1] = 0;
    }
}

// ---- casts ----

struct E4m3 {};
struct E5m2 {};

#if __CUDA_ARCH__ >= 890
DEVICE u32 pack_fp8(E4m3, float a, float b, float c, float d) { return pack_e4m3(a, b, c, d); }
DEVICE u32 pack_fp8(E5m2, float a, float b, float c, float d) { return pack_e5m2(a, b, c, d); }
#else
template <class Format> DEVICE u32 pack_fp8(Format, float, float, float, float) {
    __trap();
    return 0;
}
#endif

// Transposes 4×4 bytes.
DEVICE void transpose(u32 (&rows)[4]) {
    const u32 a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[0], rows[1], 0x7362);
    const u32 c = __byte_perm(rows[2], rows[3], 0x5140), d = __byte_perm(rows[2], rows[3], 0x7362);
    rows[0] = __byte_perm(a, c, 0x5410), rows[1] = __byte_perm(a, c, 0x7632);
    rows[2] = __byte_perm(b, d, 0x5410), rows[3] = __byte_perm(b, d, 0x7632);
}

// Where four rows of a column are in the transposed tile. Neither the stores, whose columns differ by 8, nor the loads of
// adjacent columns conflict.
DEVICE int place(int column, int four_rows) { return four_rows ^ (2 * (column / 8)) ^ (2 * (column & 1)); }

// Casts a tile into `plain` (rows, cols) and `transposed` (cols, rows). Copies the scale and its inverse to `used`, adds
// the largest absolute value to `amax`, and stores the tile's column sums in its row of `sums` (row tiles, cols). Each
// output may be null. Rows and columns are multiples of 16.
template <class Format, class From>
DEVICE void cast(
    const From& from, const float* scale, u8* plain, u8* transposed, float* used, u32* amax, float* sums, i64 rows,
    i64 cols
) {
    __shared__ u32 tile[TILE][TILE / 4];
    __shared__ float of_columns[DOWN][TILE];
    __shared__ float shared[8];
    const int across = threadIdx.x % ACROSS, down = threadIdx.x / ACROSS;
    const i64 first_row = (i64)blockIdx.y * TILE, first_column = (i64)blockIdx.x * TILE;
    const i64 column = first_column + across * 8;
    const float factor = scale[1];
    if (used && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 2) used[threadIdx.x] = scale[threadIdx.x];
    float most = 0.0f, sum[8] = {};
    for (int pass = 0; pass < TILE / 4 / DOWN; pass++) {
        const int four_rows = pass * DOWN + down;
        const i64 row = first_row + four_rows * 4;
        if (row >= rows || column >= cols) continue;
        typename From::Regs regs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) from.read(row + i, column, cols, regs[i]);
        u32 left[4], right[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float f[8];
            from.get(regs[i], f);
            most = largest(f, most);
            for (int k = 0; k < 8; k++) sum[k] += f[k], f[k] *= factor;
            left[i] = pack_fp8(Format{}, f[0], f[1], f[2], f[3]);
            right[i] = pack_fp8(Format{}, f[4], f[5], f[6], f[7]);
            if (plain) *(uint2*)(plain + (row + i) * cols + column) = make_uint2(left[i], right[i]);
        }
        if (transposed) {
            transpose(left);
            transpose(right);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int at = across * 8 + k;
                tile[at][place(at, four_rows)] = left[k];
                tile[at + 4][place(at + 4, four_rows)] = right[k];
            }
        }
    }
    if (sums) {
        for (int k = 0; k < 8; k++) of_columns[down][across * 8 + k] = sum[k];
    }
    if (amax) {
        most = block_reduce(most, Largest{}, shared);
        if (threadIdx.x == 0) atomicMax(amax, __float_as_uint(most));
    }
    __syncthreads();
    if (sums && threadIdx.x < TILE && first_column + threadIdx.x < cols) {
        float total = 0.0f;
        for (int i = 0; i < DOWN; i++) total += of_columns[i][threadIdx.x];
        sums[blockIdx.y * cols + first_column + threadIdx.x] = total;
    }
    if (!transposed) return;
    for (int i = threadIdx.x; i < TILE * (TILE / 16); i += blockDim.x) {
        const int at = i / (TILE / 16), four_rows = i % (TILE / 16) * 4;
        const i64 to = first_column + at, row = first_row + four_rows * 4;
        if (to >= cols || row >= rows) continue;
        const uint2 upper = *(const uint2*)&tile[at][place(at, four_rows)];
        const uint2 lower = *(const uint2*)&tile[at][place(at, four_rows + 2)];
        *(uint4*)(transposed + to * rows + row) = make_uint4(upper.x, upper.y, lower.x, lower.y);
    }
}

#define FROM(NAME, FROM)                                                                                               \
    KERNEL __launch_bounds__(256)                                                                                      \
    amax_##NAME(const bf16* x, const bf16* d, u32* state, float* scale, float max, i64 rows, i64 cols) {               \
        amax(FROM{x, d}, state, scale, max, rows, cols);                                                               \
    }
FROM(whole, Whole)
FROM(gelu, GeluOf)
FROM(gelu_gradient, GeluGradientOf)
FROM(swiglu, SwigluOf)

#define CAST(NAME, FORMAT, FROM)                                                                                       \
    KERNEL __launch_bounds__(256) NAME(                                                                                \
        const bf16* x, const bf16* d, const float* scale, u8* plain, u8* transposed, float* used, u32* amax,           \
        float* sums, i64 rows, i64 cols                                                                                \
    ) {                                                                                                                \
        cast<FORMAT>(FROM{x, d}, scale, plain, transposed, used, amax, sums, rows, cols);                              \
    }
CAST(e4m3_whole, E4m3, Whole)
CAST(e4m3_gelu, E4m3, GeluOf)
CAST(e4m3_swiglu, E4m3, SwigluOf)
CAST(e5m2_whole, E5m2, Whole)
CAST(e5m2_gelu_gradient, E5m2, GeluGradientOf)

// ---- delayed scales ----

// The state of a matrix between steps: inverse scale, scale, bits of the largest absolute value in this step, largest
// number of the format, and the largest absolute values of earlier steps.
constexpr int HISTORY = 16, SLOT = 4 + HISTORY;

// The scales of the next step. `at` is the place of this step in the history. A matrix that has been zero or unused in
// all steps of its history keeps its scale.
KERNEL next_scales(float* slots, i32 at, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float* slot = slots + i * SLOT;
    slot[4 + at] = slot[2];
    slot[2] = 0.0f;
    float most = 0.0f;
    for (int k = 0; k < HISTORY; k++) most = fmaxf(most, slot[4 + k]);
    if (most > 0.0f) store_scale(most, slot[3], slot);
}
