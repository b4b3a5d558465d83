// Random numbers by global index, with the same bits as on the CPU: Philox 4x32-10 with the seed as the key and (count,
// stream) as the counter. 64 counters make a group of 256 indices: word w of counter c is index 64 w + c of the group.

constexpr int SIDE = 64;

struct Key {
    u64 seed, stream;
};

struct Words {
    u32 w[4];
};

DEVICE Words philox(Key key, u64 count) {
    u32 a = (u32)count, b = (u32)(count >> 32), c = (u32)key.stream, d = (u32)(key.stream >> 32);
    u32 low = (u32)key.seed, high = (u32)(key.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 x = (u64)a * 0xd2511f53u, y = (u64)c * 0xcd9e8d57u;
        a = (u32)(y >> 32) ^ b ^ low, b = (u32)y;
        c = (u32)(x >> 32) ^ d ^ high, d = (u32)x;
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return Words{{a, b, c, d}};
}

// ---- normal numbers ----
// Products and sums are rounded one by one, never fused: the CPU computes them so at every instruction level.

DEVICE float mul_add(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }

// The natural logarithm of a normal number.
DEVICE float logarithm(float x) {
    const u32 offset = __float_as_uint(x) - 0x3f3504f3u;
    const float e = (float)((i32)offset >> 23);
    const float f = __fsub_rn(__uint_as_float((offset & 0x007fffffu) + 0x3f3504f3u), 1.0f);
    float q = mul_add(6.971611e-2f, f, -0.11479734f);
    q = mul_add(q, f, 0.1168542f);
    q = mul_add(q, f, -0.12425687f);
    q = mul_add(q, f, 0.14249058f);
    q = mul_add(q, f, -0.16667802f);
    q = mul_add(q, f, 0.20000716f);
    q = mul_add(q, f, -0.24999997f);
    q = mul_add(q, f, 0.3333333f);
    const float square = __fmul_rn(f, f);
    const float small = mul_add(e, -2.1219444e-4f, __fmul_rn(-0.5f, square));
    const float tail = mul_add(__fmul_rn(q, square), f, small);
    return mul_add(e, 0.6933594f, __fadd_rn(f, tail));
}

DEVICE float polynomial(float a, float b, float c, float d, float e, float f, float s) {
    return mul_add(mul_add(mul_add(mul_add(mul_add(a, s, b), s, c), s, d), s, e), s, f);
}

// A pair of normal numbers from two words: the first gives the radius, the second the angle.
DEVICE void box_muller(u32 radius_word, u32 angle_word, float std, float& x, float& y) {
    const float u = mul_add(__uint2float_rn(radius_word), 0x1p-32f, 0x1p-33f);
    const float radius = __fmul_rn(__fsqrt_rn(__fmul_rn(-2.0f, logarithm(u))), std);
    const float turn = __fmul_rn(__int2float_rn((i32)angle_word), 0x1p-32f);
    // Beyond a quarter turn, mirror: the sine is the same and the cosine changes its sign.
    const bool mirrored = fabsf(turn) > 0.25f;
    const float t = mirrored ? __fsub_rn(copysignf(0.5f, turn), turn) : turn, s = __fmul_rn(t, t);
    const float sin = polynomial(-14.393966f, 42.00978f, -76.70428f, 81.605225f, -41.3417f, 6.28318530717958647692f, s);
    const float cos = polynomial(-24.981435f, 60.14389f, -85.45357f, 64.93935f, -19.739208f, 1.0f, s);
    x = __fmul_rn(radius, mirrored ? -cos : cos);
    y = __fmul_rn(radius, __fmul_rn(sin, t));
}

// Numbers of the indices from `first` on. Each thread computes one counter, which gives four numbers.
template <class T> DEVICE void normal(T* out, i64 n, Key key, u64 first, float std) {
    const u64 first_group = first / (4 * SIDE), groups = (first + n - 1) / (4 * SIDE) - first_group + 1;
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups * SIDE; i += step) {
        const u64 counter = first_group * SIDE + i;
        const Words words = philox(key, counter);
        float x[4];
        box_muller(words.w[0], words.w[1], std, x[0], x[1]);
        box_muller(words.w[2], words.w[3], std, x[2], x[3]);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            // Negative before the first index.
            const i64 at = (i64)(counter / SIDE * (4 * SIDE) + w * SIDE + counter % SIDE - first);
            if (at >= 0 && at < n) out[at] = from_float<T>(x[w]);
        }
    }
}

KERNEL normal_f32(float* out, i64 n, u64 seed, u64 stream, u64 first, float std) {
    normal(out, n, Key{seed, stream}, first, std);
}

KERNEL normal_bf16(bf16* out, i64 n, u64 seed, u64 stream, u64 first, float std) {
    normal(out, n, Key{seed, stream}, first, std);
}

// ---- dropout ----

// Each thread has V adjacent counters, which decide on four runs of V elements.
template <int V, class T> DEVICE void dropout(T* x, i64 n, Key key, u64 first, u32 threshold, float scale) {
    const u64 first_group = first / (4 * SIDE), groups = (first + n - 1) / (4 * SIDE) - first_group + 1;
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < groups * (SIDE / V); i += step) {
        const u64 counter = first_group * SIDE + i * V;
        const i64 at = (i64)(counter / SIDE * (4 * SIDE) + counter % SIDE - first);
        Raw<T, V> raw[4];
        // Runs are inside or outside as a whole, apart from the last one.
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const i64 from = at + w * SIDE;
            if (from >= 0 && from + V <= n) raw[w] = load_raw<V>(x + from);
        }
        Words words[V];
        for (int k = 0; k < V; k++) words[k] = philox(key, counter + k);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const i64 from = at + w * SIDE;
            if (from >= 0 && from + V <= n) {
                float f[V];
                unpack(raw[w], f);
                for (int k = 0; k < V; k++) f[k] = words[k].w[w] < threshold ? 0.0f : f[k] * scale;
                store(x + from, f);
            } else if (from >= 0) {
                for (int k = 0; k < V && from + k < n; k++) {
                    const float kept = words[k].w[w] < threshold ? 0.0f : to_float(x[from + k]) * scale;
                    x[from + k] = from_float<T>(kept);
                }
            }
        }
    }
}

#define DROPOUT(NAME, T)                                                                                               \
    KERNEL NAME(T* x, i64 n, u64 seed, u64 stream, u64 first, u32 threshold, float scale) {                            \
        const Key key = {seed, stream};                                                                                \
        if (first % 4 == 0 && aligned<4>(x)) dropout<4>(x, n, key, first, threshold, scale);                           \
        else dropout<1>(x, n, key, first, threshold, scale);                                                           \
    }
DROPOUT(dropout_f32, float)
DROPOUT(dropout_bf16, bf16)
