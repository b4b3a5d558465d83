// Compression of gradients: quantized codes, and the top-k elements as pairs of index and value. Codes, pairs and
// residuals have the same bits as on the CPU, so products and sums are rounded one by one.

DEVICE bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// A number at any address: packed numbers of several ranks follow one another without padding.
template <class T> DEVICE T read_bytes(const u8* from) {
    if (((u64)from & (sizeof(T) - 1)) == 0) return *(const T*)from;
    u32 word = 0;
    for (int i = 0; i < (int)sizeof(T); i++) word |= (u32)from[i] << 8 * i;
    return (T)word;
}

template <class T> DEVICE void write_bytes(u8* to, T value) {
    if (((u64)to & (sizeof(T) - 1)) == 0) {
        *(T*)to = value;
    } else {
        for (int i = 0; i < (int)sizeof(T); i++) to[i] = (u8)((u32)value >> 8 * i);
    }
}

// ---- quantized codes ----

// Elements that share a scale.
constexpr int CHUNK = 256;

// Rounds to nearest, ties to even; a NaN keeps its upper bits.
DEVICE u16 to_bf16_code(float x) {
    const u32 bits = __float_as_uint(x);
    return (u16)(x != x ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Rounds a number below 65504 to f16, ties to even.
DEVICE u16 to_f16_code(float x) {
    const u32 sign = __float_as_uint(x) >> 16 & 0x8000u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    const u32 normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
    const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
    return (u16)(sign | (magnitude < 113u << 23 ? subnormal : normal));
}

DEVICE float from_f16_code(u16 code) {
    const u32 sign = ((u32)code & 0x8000u) << 16, magnitude = code & 0x7fffu;
    const u32 normal = (magnitude << 13) + (112u << 23);
    const u32 subnormal = __float_as_uint(__fmul_rn((float)magnitude, 0x1p-24f));
    return __uint_as_float(sign | (magnitude < 1u << 10 ? subnormal : normal));
}

// Zero if it is not finite, because NaN would persist in the residual.
DEVICE float rounding_error(float sum, float sent) {
    const float error = __fsub_rn(sum, sent);
    return finite(error) ? error : 0.0f;
}

struct Scale {
    float scale, inverse;
};

// Formats with a scale per chunk: the scale for the largest magnitude, and a code with the number that it stands for.
struct F16 {
    typedef u16 Code;
    // A power of two that brings `max` between 2^14 and 2^15.
    static DEVICE Scale scale(float max) {
        const i32 exponent = (i32)(__float_as_uint(max) >> 23) - 14;
        const u32 scale = exponent > 1 ? exponent : 1;
        return {finite(max) ? __uint_as_float(scale << 23) : not_a_number(), __uint_as_float((254u - scale) << 23)};
    }
    static DEVICE Code encode(float x, Scale s, float& sent) {
        const u16 code = to_f16_code(__fmul_rn(x, s.inverse));
        sent = __fmul_rn(from_f16_code(code), s.scale);
        return code;
    }
    static DEVICE float decode(Code code, float scale) { return __fmul_rn(from_f16_code(code), scale); }
};

struct Int8 {
    typedef u8 Code;
    static DEVICE Scale scale(float max) {
        const float inverse = __fdiv_rn(127.0f, max);
        if (!finite(max)) return {not_a_number(), 0.0f};
        return finite(inverse) ? Scale{__fdiv_rn(max, 127.0f), inverse} : Scale{0.0f, 0.0f};
    }
    // With this added, the last place of an f32 is one, and the lowest byte is the code.
    static constexpr float ONES = 12582912.0f;
    static DEVICE Code encode(float x, Scale s, float& sent) {
        const float shifted = __fadd_rn(__fmul_rn(x, s.inverse), ONES);
        sent = __fmul_rn(__fsub_rn(shifted, ONES), s.scale);
        return (u8)__float_as_uint(shifted);
    }
    static DEVICE float decode(Code code, float scale) { return __fmul_rn((float)(signed char)code, scale); }
};

struct Bf16 {
    typedef u16 Code;
    static DEVICE float decode(Code code, float) { return __uint_as_float((u32)code << 16); }
};

// A chunk per warp, 8 elements per lane. `scales` are followed by the codes.
template <class Format> DEVICE void pack_chunks(const float* x, float* error, u8* packed, i64 n) {
    typedef typename Format::Code Code;
    constexpr int V = CHUNK / 32, WORDS = V * sizeof(Code) / 4;
    const i64 chunks = (n + CHUNK - 1) / CHUNK, warps = (i64)gridDim.x * (blockDim.x / 32);
    u8* codes = packed + 4 * chunks;
    const bool even = ((u64)packed & 3) == 0;
    const int lane = threadIdx.x & 31;
    for (i64 chunk = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; chunk < chunks; chunk += warps) {
        const i64 first = chunk * CHUNK + lane * V;
        const bool whole = (chunk + 1) * CHUNK <= n;
        const bool wide = whole && aligned<V>(x) && aligned<V>(error);
        float sum[V] = {}, added[V] = {};
        if (wide) {
            load(x + first, sum);
            load(error + first, added);
        } else {
            for (int k = 0; k < V; k++)
                if (first + k < n) sum[k] = x[first + k], added[k] = error[first + k];
        }
        // Magnitudes compare like integers, with NaN above infinity.
        u32 max = 0;
        for (int k = 0; k < V; k++) {
            sum[k] = __fadd_rn(added[k], sum[k]);
            if (first + k < n) max = umax(max, __float_as_uint(sum[k]) & 0x7fffffffu);
        }
        max = __reduce_max_sync(ALL_LANES, max);
        const Scale scale = Format::scale(__uint_as_float(max));
        if (lane == 0) write_bytes(packed + 4 * chunk, __float_as_uint(scale.scale));
        union {
            Code each[V];
            u32 words[WORDS];
        } code;
        for (int k = 0; k < V; k++) {
            float sent;
            code.each[k] = Format::encode(sum[k], scale, sent);
            sum[k] = rounding_error(sum[k], sent);
        }
        if (wide) store(error + first, sum);
        u8* to = codes + first * (i64)sizeof(Code);
        if (whole && even) {
            for (int w = 0; w < WORDS; w++) ((u32*)to)[w] = code.words[w];
        }
        for (int k = 0; k < V; k++) {
            if (!wide && first + k < n) error[first + k] = sum[k];
            if (!(whole && even) && first + k < n) write_bytes(to + k * sizeof(Code), code.each[k]);
        }
    }
}

KERNEL pack_f16(const float* x, float* error, u8* packed, i64 n) { pack_chunks<F16>(x, error, packed, n); }
KERNEL pack_int8(const float* x, float* error, u8* packed, i64 n) { pack_chunks<Int8>(x, error, packed, n); }

struct PackBf16 {
    template <int V> struct Regs { Raw<float, V> x, error; };
    const float* x;
    float* error;
    u8* codes;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        r.x = load_raw<V>(x + i);
        r.error = load_raw<V>(error + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float sum[V], e[V];
        unpack(r.x, sum);
        unpack(r.error, e);
        u16 code[V];
        for (int k = 0; k < V; k++) {
            sum[k] = __fadd_rn(sum[k], e[k]);
            code[k] = to_bf16_code(sum[k]);
            e[k] = rounding_error(sum[k], Bf16::decode(code[k], 1.0f));
        }
        store<V>(error + i, e);
        if constexpr (V == 4) {
            const uint2 words = make_uint2(code[0] | (u32)code[1] << 16, code[2] | (u32)code[3] << 16);
            *(uint2*)(codes + 2 * i) = words;
        } else {
            write_bytes(codes + 2 * i, code[0]);
        }
    }
};

KERNEL pack_bf16(const float* x, float* error, u8* codes, i64 n) {
    over<4, 2>(PackBf16{x, error, codes}, n, aligned<4>(x) && aligned<4>(error) && ((u64)codes & 7) == 0);
}

template <class Format, bool ADD> struct Unpack {
    typedef typename Format::Code Code;
    template <int V> struct Regs {
        union {
            Code each[V];
            u32 words[V * sizeof(Code) >= 4 ? V * sizeof(Code) / 4 : 1];
        };
        Raw<float, V> out;
    };
    const u8 *scales, *codes;
    float* out;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        if constexpr (V > 1) {
            const u32* words = (const u32*)(codes + i * (i64)sizeof(Code));
            for (int w = 0; w < V * (int)sizeof(Code) / 4; w++) r.words[w] = words[w];
        } else {
            r.each[0] = read_bytes<Code>(codes + i * (i64)sizeof(Code));
        }
        if (ADD) r.out = load_raw<V>(out + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float f[V] = {};
        if (ADD) unpack(r.out, f);
        const float scale = scales ? __uint_as_float(read_bytes<u32>(scales + i / CHUNK * 4)) : 1.0f;
        for (int k = 0; k < V; k++) {
            const float x = Format::decode(r.each[k], scale);
            f[k] = ADD ? __fadd_rn(f[k], x) : x;
        }
        store<V>(out + i, f);
    }
};

template <class Format, bool ADD> DEVICE void unpack_all(const u8* packed, float* out, i64 n, bool scaled) {
    const u8* codes = packed + (scaled ? 4 * ((n + CHUNK - 1) / CHUNK) : 0);
    const bool wide = ((u64)codes & 3) == 0 && aligned<4>(out);
    over<4, 2>(Unpack<Format, ADD>{scaled ? packed : nullptr, codes, out}, n, wide);
}

KERNEL unpack_bf16(const u8* packed, float* out, i64 n) { unpack_all<Bf16, false>(packed, out, n, false); }
KERNEL unpack_f16(const u8* packed, float* out, i64 n) { unpack_all<F16, false>(packed, out, n, true); }
KERNEL unpack_int8(const u8* packed, float* out, i64 n) { unpack_all<Int8, false>(packed, out, n, true); }
KERNEL add_unpacked_bf16(const u8* packed, float* out, i64 n) { unpack_all<Bf16, true>(packed, out, n, false); }
KERNEL add_unpacked_f16(const u8* packed, float* out, i64 n) { unpack_all<F16, true>(packed, out, n, true); }
KERNEL add_unpacked_int8(const u8* packed, float* out, i64 n) { unpack_all<Int8, true>(packed, out, n, true); }

// ---- top-k ----

constexpr float DECAY = 0.95f, MIN_SQUARE = 1e-30f, EPS = 1e-8f;

// Contribution of an element to its mean square; zero if it is not finite.
DEVICE float contribution(float x) {
    const float square = __fmul_rn(__fmul_rn(x, x), 1.0f - DECAY);
    return finite(square) ? square : 0.0f;
}

DEVICE float decayed(float square) { return fmaxf(__fmul_rn(square, DECAY), MIN_SQUARE); }

// residual += x; squares decay; ratios = residual / root mean square.
struct Ratios {
    template <int V> struct Regs { Raw<float, V> x, residual, square; };
    const float* x;
    float *residual, *squares, *ratios;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        r.x = load_raw<V>(x + i);
        r.residual = load_raw<V>(residual + i);
        r.square = load_raw<V>(squares + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float a[V], b[V], s[V];
        unpack(r.x, a);
        unpack(r.residual, b);
        unpack(r.square, s);
        for (int k = 0; k < V; k++) {
            b[k] = __fadd_rn(b[k], a[k]);
            s[k] = decayed(s[k]);
            a[k] = __fdiv_rn(b[k], __fadd_rn(__fsqrt_rn(s[k]), EPS));
        }
        store<V>(residual + i, b);
        store<V>(squares + i, s);
        store<V>(ratios + i, a);
    }
};

KERNEL topk_ratios(const float* x, float* residual, float* squares, float* ratios, i64 n) {
    const bool wide = aligned<4>(x) && aligned<4>(residual) && aligned<4>(squares) && aligned<4>(ratios);
    over<4, 1>(Ratios{x, residual, squares, ratios}, n, wide);
}

KERNEL follow_squares(const float* x, float* squares, i64 n) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        squares[i] = __fadd_rn(decayed(squares[i]), contribution(x[i]));
}

// Progress of the search for the k-th largest magnitude: its upper digits, and how many of the elements that share them
// are among the k.
struct Search {
    u32 high, left;
};

DEVICE u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Values of a digit.
constexpr int VALUES = 2048;

// Counts elements by a digit of their magnitude, among those with the upper digits found so far.
KERNEL __launch_bounds__(256) topk_count(const float* x, u32* counts, const Search* search, i64 n, i32 shift, i32 width) {
    __shared__ u32 shared[VALUES];
    for (int i = threadIdx.x; i < VALUES; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    const u32 high = search->high;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const u32 m = magnitude(x[i]);
        if (m >> (shift + width) == high) atomicAdd(&shared[m >> shift & ((1u << width) - 1)], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < VALUES; i += blockDim.x)
        if (shared[i]) atomicAdd(&counts[i], shared[i]);
}

// Finds the digit of the k-th largest magnitude, and clears the counts. One block.
KERNEL __launch_bounds__(1024) topk_digit(u32* counts, Search* search, i32 width) {
    __shared__ u32 shared[32];
    const Search before = *search;
    // From the largest value down, two per thread.
    const int top = VALUES - 1 - 2 * threadIdx.x;
    const u32 a = counts[top], b = counts[top - 1];
    u32 total, larger = block_sum_before(a + b, shared, total);
    for (int k = 0; k < 2; k++) {
        const u32 count = k == 0 ? a : b;
        if (larger < before.left && before.left - larger <= count)
            *search = Search{before.high << width | (u32)(top - k), before.left - larger};
        larger += count;
    }
    counts[top] = counts[top - 1] = 0;
}

constexpr int PER_THREAD = 16;
constexpr int TILE = 256 * PER_THREAD;

// Numbers of elements of a tile that are larger than the k-th largest and equal to it.
KERNEL __launch_bounds__(256) topk_tiles(const float* x, uint2* tiles, const Search* search, i64 n) {
    __shared__ u32 shared[32], shared_equal[32];
    const u32 least = search->high;
    u32 larger = 0, equal = 0;
    for (int k = 0; k < PER_THREAD; k++) {
        const i64 i = (i64)blockIdx.x * TILE + k * 256 + threadIdx.x;
        if (i < n) larger += magnitude(x[i]) > least, equal += magnitude(x[i]) == least;
    }
    larger = block_sum(larger, shared);
    equal = block_sum(equal, shared_equal);
    if (threadIdx.x == 0) tiles[blockIdx.x] = make_uint2(larger, equal);
}

// Replaces the numbers of each tile by the sums over the tiles before it. One block.
KERNEL __launch_bounds__(1024) topk_offsets(uint2* tiles, i64 count) {
    __shared__ u32 shared[32];
    uint2 before = make_uint2(0, 0);
    for (i64 base = 0; base < count; base += 1024) {
        const i64 i = base + threadIdx.x;
        const uint2 own = i < count ? tiles[i] : make_uint2(0, 0);
        uint2 total;
        const u32 larger = block_sum_before(own.x, shared, total.x), equal = block_sum_before(own.y, shared, total.y);
        if (i < count) tiles[i] = make_uint2(before.x + larger, before.y + equal);
        before.x += total.x, before.y += total.y;
    }
}

// Moves the elements larger than the k-th largest, and the first ones equal to it, from `residual` to `pairs`.
KERNEL __launch_bounds__(256) topk_take(
    const float* ratios, float* residual, float* squares, u32* pairs, const uint2* tiles, const Search* search, i64 n
) {
    __shared__ u32 shared[32];
    const u32 least = search->high, limit = search->left;
    const i64 first = (i64)blockIdx.x * TILE + threadIdx.x * PER_THREAD;
    u32 larger = 0, equal = 0, total;
    for (int k = 0; k < PER_THREAD; k++) {
        if (first + k < n) larger += magnitude(ratios[first + k]) > least, equal += magnitude(ratios[first + k]) == least;
    }
    u32 larger_before = tiles[blockIdx.x].x + block_sum_before(larger, shared, total);
    u32 equal_before = tiles[blockIdx.x].y + block_sum_before(equal, shared, total);
    for (int k = 0; k < PER_THREAD; k++) {
        const i64 i = first + k;
        if (i >= n) break;
        const u32 m = magnitude(ratios[i]);
        if (m > least || (m == least && equal_before < limit)) {
            const i64 place = (i64)larger_before + umin(equal_before, limit);
            const float value = residual[i];
            pairs[2 * place] = (u32)i;
            pairs[2 * place + 1] = __float_as_uint(value);
            residual[i] = 0.0f;
            squares[i] = __fadd_rn(squares[i], contribution(value));
        }
        larger_before += m > least;
        equal_before += m == least;
    }
}

// ---- pairs ----

// The element of each pair; `len` for pairs outside the buffer.
KERNEL pair_keys(const u32* pairs, u32* keys, i64 n, u64 first, u32 len) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const u64 index = pairs[2 * i];
    keys[i] = index >= first && index - first < len ? (u32)(index - first) : len;
}

// Adds pairs, which are sorted by element and in their order within an element.
KERNEL add_pairs(const u32* pairs, const u32* keys, const u32* order, float* out, i64 n, u32 len) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || keys[i] == len || (i > 0 && keys[i - 1] == keys[i])) return;
    const u32 key = keys[i];
    float sum = out[key];
    for (i64 j = i; j < n && keys[j] == key; j++) sum = __fadd_rn(sum, __uint_as_float(pairs[2 * (i64)order[j] + 1]));
    out[key] = sum;
}

// The number of pairs with a smaller index. One thread.
KERNEL pairs_below(const u32* pairs, i64 n, u64 index, double* out) {
    i64 low = 0, high = n;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (pairs[2 * middle] < index) low = middle + 1;
        else high = middle;
    }
    *out = (double)low;
}
