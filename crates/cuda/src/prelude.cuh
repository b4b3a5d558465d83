// Numbers, vector loads and stores, and reductions that all kernels share.

constexpr u32 ALL_LANES = 0xffffffffu;

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

// ---- bf16 ----

struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) { return bf16{(u16)pack_bf16(x, 0.0f)}; }

DEVICE float low_half(u32 both) { return __uint_as_float(both << 16); }
DEVICE float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// ---- vectors ----

// Elements of 16 bytes.
template <class T> constexpr int WIDTH = 16 / sizeof(T);

// V elements as they are in memory; half the registers of V floats for bf16.
template <class T, int V> struct Raw;
template <> struct Raw<float, 1> { float x; };
template <> struct Raw<float, 4> { float4 x; };
template <> struct Raw<float, 8> { float4 x, y; };
template <> struct Raw<bf16, 1> { bf16 x; };
template <> struct Raw<bf16, 4> { uint2 x; };
template <> struct Raw<bf16, 8> { uint4 x; };

DEVICE Raw<float, 1> load_raw(const float* p, Raw<float, 1>) { return {*p}; }
DEVICE Raw<float, 4> load_raw(const float* p, Raw<float, 4>) { return {*(const float4*)p}; }
DEVICE Raw<float, 8> load_raw(const float* p, Raw<float, 8>) { return {((const float4*)p)[0], ((const float4*)p)[1]}; }
DEVICE Raw<bf16, 1> load_raw(const bf16* p, Raw<bf16, 1>) { return {*p}; }
DEVICE Raw<bf16, 4> load_raw(const bf16* p, Raw<bf16, 4>) { return {*(const uint2*)p}; }
DEVICE Raw<bf16, 8> load_raw(const bf16* p, Raw<bf16, 8>) { return {*(const uint4*)p}; }

template <int V, class T> DEVICE Raw<T, V> load_raw(const T* p) { return load_raw(p, Raw<T, V>{}); }

// As `load_raw`, for data that is not read again soon.
DEVICE Raw<float, 1> stream_raw(const float* p, Raw<float, 1>) { return {__ldcs(p)}; }
DEVICE Raw<float, 4> stream_raw(const float* p, Raw<float, 4>) { return {__ldcs((const float4*)p)}; }
DEVICE Raw<float, 8> stream_raw(const float* p, Raw<float, 8>) {
    return {__ldcs((const float4*)p), __ldcs((const float4*)p + 1)};
}
DEVICE Raw<bf16, 1> stream_raw(const bf16* p, Raw<bf16, 1>) { return {bf16{__ldcs((const u16*)p)}}; }
DEVICE Raw<bf16, 4> stream_raw(const bf16* p, Raw<bf16, 4>) { return {__ldcs((const uint2*)p)}; }
DEVICE Raw<bf16, 8> stream_raw(const bf16* p, Raw<bf16, 8>) { return {__ldcs((const uint4*)p)}; }

template <int V, class T> DEVICE Raw<T, V> stream_raw(const T* p) { return stream_raw(p, Raw<T, V>{}); }

DEVICE void unpack4(float4 q, float* f) { f[0] = q.x, f[1] = q.y, f[2] = q.z, f[3] = q.w; }
DEVICE void unpack2(u32 q, float* f) { f[0] = low_half(q), f[1] = high_half(q); }

DEVICE void unpack(Raw<float, 1> raw, float (&f)[1]) { f[0] = raw.x; }
DEVICE void unpack(Raw<float, 4> raw, float (&f)[4]) { unpack4(raw.x, f); }
DEVICE void unpack(Raw<float, 8> raw, float (&f)[8]) { unpack4(raw.x, f), unpack4(raw.y, f + 4); }
DEVICE void unpack(Raw<bf16, 1> raw, float (&f)[1]) { f[0] = to_float(raw.x); }
DEVICE void unpack(Raw<bf16, 4> raw, float (&f)[4]) { unpack2(raw.x.x, f), unpack2(raw.x.y, f + 2); }
DEVICE void unpack(Raw<bf16, 8> raw, float (&f)[8]) {
    unpack2(raw.x.x, f), unpack2(raw.x.y, f + 2), unpack2(raw.x.z, f + 4), unpack2(raw.x.w, f + 6);
}

template <class T> DEVICE void pack(const float (&f)[1], Raw<T, 1>& raw) { raw.x = from_float<T>(f[0]); }
DEVICE void pack(const float (&f)[4], Raw<float, 4>& raw) { raw.x = make_float4(f[0], f[1], f[2], f[3]); }
DEVICE void pack(const float (&f)[8], Raw<float, 8>& raw) {
    raw.x = make_float4(f[0], f[1], f[2], f[3]);
    raw.y = make_float4(f[4], f[5], f[6], f[7]);
}
DEVICE void pack(const float (&f)[4], Raw<bf16, 4>& raw) {
    raw.x = make_uint2(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]));
}
DEVICE void pack(const float (&f)[8], Raw<bf16, 8>& raw) {
    raw.x = make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}

DEVICE void store_raw(float* p, Raw<float, 1> raw) { *p = raw.x; }
DEVICE void store_raw(float* p, Raw<float, 4> raw) { *(float4*)p = raw.x; }
DEVICE void store_raw(float* p, Raw<float, 8> raw) { ((float4*)p)[0] = raw.x, ((float4*)p)[1] = raw.y; }
DEVICE void store_raw(bf16* p, Raw<bf16, 1> raw) { *p = raw.x; }
DEVICE void store_raw(bf16* p, Raw<bf16, 4> raw) { *(uint2*)p = raw.x; }
DEVICE void store_raw(bf16* p, Raw<bf16, 8> raw) { *(uint4*)p = raw.x; }

// As `store_raw`, for data that is not read soon.
DEVICE void stream_out(float* p, Raw<float, 1> raw) { __stcs(p, raw.x); }
DEVICE void stream_out(float* p, Raw<float, 4> raw) { __stcs((float4*)p, raw.x); }
DEVICE void stream_out(float* p, Raw<float, 8> raw) { __stcs((float4*)p, raw.x), __stcs((float4*)p + 1, raw.y); }
DEVICE void stream_out(bf16* p, Raw<bf16, 1> raw) { __stcs((u16*)p, raw.x.bits); }
DEVICE void stream_out(bf16* p, Raw<bf16, 4> raw) { __stcs((uint2*)p, raw.x); }
DEVICE void stream_out(bf16* p, Raw<bf16, 8> raw) { __stcs((uint4*)p, raw.x); }

template <int V, class T> DEVICE void load(const T* p, float (&f)[V]) { unpack(load_raw<V>(p), f); }

template <int V, class T> DEVICE void store(T* p, const float (&f)[V]) {
    Raw<T, V> raw;
    pack(f, raw);
    store_raw(p, raw);
}

template <int V, class T> DEVICE void store_stream(T* p, const float (&f)[V]) {
    Raw<T, V> raw;
    pack(f, raw);
    stream_out(p, raw);
}

// Whether V elements at `p` can be accessed at once.
template <int V, class T> DEVICE bool aligned(const T* p) {
    constexpr u64 bytes = V * sizeof(T) < 16 ? V * sizeof(T) : 16;
    return ((u64)p & (bytes - 1)) == 0;
}

// ---- elementwise ----

// Applies `op` to n elements: `read` for U runs of V elements, then `write` for them, so that U loads are in flight. An
// `op` declares the registers of a run, `Regs<V>`.
template <int V, int U, class Op> DEVICE void over_vectors(const Op& op, i64 n) {
    const i64 vectors = n / V, step = (i64)gridDim.x * blockDim.x * U;
    for (i64 at = (i64)blockIdx.x * blockDim.x * U + threadIdx.x; at < vectors; at += step) {
        typename Op::template Regs<V> regs[U];
#pragma unroll
        for (int u = 0; u < U; u++) {
            const i64 i = at + u * (i64)blockDim.x;
            if (i < vectors) op.read(i * V, regs[u]);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            const i64 i = at + u * (i64)blockDim.x;
            if (i < vectors) op.write(i * V, regs[u]);
        }
    }
    if (V > 1) {
        const i64 i = vectors * V + (i64)blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) {
            typename Op::template Regs<1> regs;
            op.read(i, regs);
            op.write(i, regs);
        }
    }
}

// As above, with runs of V elements if all addresses allow it.
template <int V, int U, class Op> DEVICE void over(const Op& op, i64 n, bool wide) {
    if (wide) over_vectors<V, U>(op, n);
    else over_vectors<1, U>(op, n);
}

// Quotient of indices. Division of 64 bits is slow, and seldom needed.
DEVICE i64 quotient(i64 a, i64 b) {
    return ((u64)a | (u64)b) >> 32 ? a / b : (i64)((u32)a / (u32)b);
}

// ---- reductions ----

struct Sum {
    template <class T> DEVICE T operator()(T a, T b) const { return a + b; }
    static DEVICE float identity() { return 0.0f; }
};

// The larger number; a NaN is ignored.
struct Largest {
    DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
    static DEVICE float identity() { return -infinity(); }
};

// Reduction over the lanes of a warp; all lanes get the result.
template <class Op, class T> DEVICE T warp_reduce(T x, Op op) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

template <class T> DEVICE T warp_sum(T x) { return warp_reduce(x, Sum{}); }

// Reduction over the threads of a block of whole warps; all threads get the result. `shared` has an element per warp,
// and may be used again after a barrier.
template <class Op, class T> DEVICE T block_reduce(T x, Op op, T* shared) {
    const int warps = blockDim.x / 32, lane = threadIdx.x & 31;
    x = warp_reduce(x, op);
    if (warps == 1) return x;
    if (lane == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = lane < warps ? shared[lane] : (T)Op::identity();
    return warp_reduce(x, op);
}

template <class T> DEVICE T block_sum(T x, T* shared) { return block_reduce(x, Sum{}, shared); }

// Sum over all lower lanes of the warp.
DEVICE u32 warp_sum_before(u32 x) {
    const int lane = threadIdx.x & 31;
    u32 sum = x;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, offset);
        if (lane >= offset) sum += other;
    }
    return sum - x;
}

// Sum over all lower threads of the block, and over the whole block. `shared` has an element per warp.
DEVICE u32 block_sum_before(u32 x, u32* shared, u32& total) {
    const int warps = blockDim.x / 32, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const u32 before = warp_sum_before(x);
    if (lane == 31) shared[warp] = before + x;
    __syncthreads();
    const u32 sum = lane < warps ? shared[lane] : 0;
    const u32 warps_before = warp_sum_before(sum);
    total = __shfl_sync(ALL_LANES, warps_before + sum, 31);
    const u32 result = before + __shfl_sync(ALL_LANES, warps_before, warp);
    __syncthreads();
    return result;
}

// ---- functions ----

// e^x: accurate for f32, and with an error below that of rounding for bf16.
template <class T> DEVICE float exp_for(float x);
template <> DEVICE float exp_for<float>(float x) { return expf(x); }
template <> DEVICE float exp_for<bf16>(float x) { return __expf(x); }

// e^x relative to a largest x: `shift` is `exp_shift` of it.
template <class T> DEVICE float exp_shift(float largest);
template <> DEVICE float exp_shift<float>(float largest) { return largest; }
template <> DEVICE float exp_shift<bf16>(float largest) { return largest * 1.4426950408889634f; }

template <class T> DEVICE float exp_shifted(float x, float shift);
template <> DEVICE float exp_shifted<float>(float x, float shift) { return expf(x - shift); }
template <> DEVICE float exp_shifted<bf16>(float x, float shift) {
    return exp2_approximate(fmaf(x, 1.4426950408889634f, -shift));
}

template <class T> DEVICE float divide_for(float a, float b);
template <> DEVICE float divide_for<float>(float a, float b) { return a / b; }
template <> DEVICE float divide_for<bf16>(float a, float b) { return __fdividef(a, b); }

// ---- sums over parts ----

// Sums of up to 32 columns over the rows of `parts`, in a fixed order, by a block of 1024 threads. The first warp gets
// them, one column per lane.
DEVICE float sum_parts(const float* first, i64 parts, i64 stride, bool valid) {
    __shared__ float sums[32][33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float sum = 0.0f;
    if (valid) {
#pragma unroll 4
        for (i64 part = warp; part < parts; part += 32) sum += first[part * stride + lane];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = warp_sum(sums[lane][warp]);
    __syncthreads();
    if (lane == 0) sums[0][warp] = sum;
    __syncthreads();
    return sums[0][lane];
}
