// Collectives of ranks that share a GPU, as one pass over all their buffers. The layouts of `Reduction` and `Copies` are
// those of launch.rs.

constexpr int MEMBERS = 32;
constexpr int COPIES = 64;
constexpr int TARGETS = 192;

enum Op { SUM = 1, MEAN, MIN, MAX, PRODUCT };

struct f16 {
    u16 bits;
};

DEVICE float to_float(f16 x) { return f16_to_float(x.bits); }
DEVICE f16 to_f16(float x) { return f16{float_to_f16(x)}; }

// The type in which contributions are combined, and conversions.
template <class T> struct Number {
    typedef T Acc;
    static DEVICE T widen(T x) { return x; }
    static DEVICE T narrow(T x) { return x; }
};
template <> struct Number<bf16> {
    typedef float Acc;
    static DEVICE float widen(bf16 x) { return to_float(x); }
    static DEVICE bf16 narrow(float x) { return from_float<bf16>(x); }
};
template <> struct Number<f16> {
    typedef float Acc;
    static DEVICE float widen(f16 x) { return to_float(x); }
    static DEVICE f16 narrow(float x) { return to_f16(x); }
};

// Integers wrap around: they are combined without a sign.
DEVICE float plus(float a, float b) { return a + b; }
DEVICE double plus(double a, double b) { return a + b; }
DEVICE i32 plus(i32 a, i32 b) { return (i32)((u32)a + (u32)b); }
DEVICE u32 plus(u32 a, u32 b) { return a + b; }
DEVICE i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE u8 plus(u8 a, u8 b) { return (u8)(a + b); }
DEVICE float times(float a, float b) { return a * b; }
DEVICE double times(double a, double b) { return a * b; }
DEVICE i32 times(i32 a, i32 b) { return (i32)((u32)a * (u32)b); }
DEVICE u32 times(u32 a, u32 b) { return a * b; }
DEVICE i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
DEVICE u8 times(u8 a, u8 b) { return (u8)(a * b); }

// A NaN of any contribution is the result of MIN and MAX.
template <class A> DEVICE A combine(A a, A b, int op) {
    switch (op) {
    case SUM:
    case MEAN: return plus(a, b);
    case MIN: return a < b || a != a ? a : b;
    case MAX: return a > b || a != a ? a : b;
    default: return times(a, b);
    }
}

// Job j combines elements start[j].. of all inputs, in member order, and writes them to `outputs_per_job` outputs.
struct Reduction {
    const char* inputs[MEMBERS];
    char* outputs[MEMBERS];
    u64 start[MEMBERS];
    u64 count[MEMBERS];
    // Whether all addresses of job j are multiples of 16.
    u32 aligned;
    u32 members;
    u32 outputs_per_job;
    u32 op;
};

template <class T, int V> struct alignas(sizeof(T) * V) Run {
    T x[V];
};

template <class T, int V> DEVICE void reduce_run(const Reduction& r, u64 at, int job) {
    typedef typename Number<T>::Acc Acc;
    constexpr int AHEAD = 4;
    const int members = r.members, op = r.op;
    Acc acc[V];
    for (int first = 0; first < members; first += AHEAD) {
        Run<T, V> loaded[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (first + k < members) loaded[k] = *(const Run<T, V>*)(r.inputs[first + k] + (r.start[job] + at) * sizeof(T));
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (first + k >= members) break;
#pragma unroll
            for (int v = 0; v < V; v++) {
                const Acc x = Number<T>::widen(loaded[k].x[v]);
                acc[v] = first + k == 0 ? x : combine(acc[v], x, op);
            }
        }
    }
    Run<T, V> result;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (op == MEAN) acc[v] = (Acc)(acc[v] / (Acc)members);
        result.x[v] = Number<T>::narrow(acc[v]);
    }
    for (u32 k = 0; k < r.outputs_per_job; k++)
        *(Run<T, V>*)(r.outputs[job * r.outputs_per_job + k] + at * sizeof(T)) = result;
}

template <class T> DEVICE void reduce(const Reduction& r) {
    constexpr int V = WIDTH<T>;
    const int job = blockIdx.y;
    const u64 n = r.count[job], first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    if (r.aligned >> job & 1) {
        const u64 runs = n / V;
        for (u64 i = first; i < runs; i += step) reduce_run<T, V>(r, i * V, job);
        if (runs * V + first < n) reduce_run<T, 1>(r, runs * V + first, job);
    } else {
        for (u64 i = first; i < n; i += step) reduce_run<T, 1>(r, i, job);
    }
}

KERNEL reduce_f32(const __grid_constant__ Reduction r) { reduce<float>(r); }
KERNEL reduce_f64(const __grid_constant__ Reduction r) { reduce<double>(r); }
KERNEL reduce_f16(const __grid_constant__ Reduction r) { reduce<f16>(r); }
KERNEL reduce_bf16(const __grid_constant__ Reduction r) { reduce<bf16>(r); }
KERNEL reduce_i32(const __grid_constant__ Reduction r) { reduce<i32>(r); }
KERNEL reduce_i64(const __grid_constant__ Reduction r) { reduce<i64>(r); }
KERNEL reduce_u8(const __grid_constant__ Reduction r) { reduce<u8>(r); }
KERNEL reduce_u32(const __grid_constant__ Reduction r) { reduce<u32>(r); }

// Copy c moves `bytes[c]` bytes from `sources[c]` to targets first_target[c]..first_target[c + 1].
struct Copies {
    const char* sources[COPIES];
    u64 bytes[COPIES];
    char* targets[TARGETS];
    u16 first_target[COPIES + 2];
};

template <class T> DEVICE void copy_as(const Copies& c, int copy, u64 n) {
    const T* from = (const T*)c.sources[copy];
    constexpr int AHEAD = 4;
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step * AHEAD) {
        T x[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (i + k * step < n) x[k] = from[i + k * step];
        for (int t = c.first_target[copy]; t < c.first_target[copy + 1]; t++) {
            T* to = (T*)c.targets[t];
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                if (i + k * step < n) to[i + k * step] = x[k];
        }
    }
}

KERNEL copy(const __grid_constant__ Copies c) {
    const int job = blockIdx.y;
    const u64 bytes = c.bytes[job];
    u64 addresses = (u64)c.sources[job];
    for (int t = c.first_target[job]; t < c.first_target[job + 1]; t++) addresses |= (u64)c.targets[t];
    // Words as wide as all addresses allow, then the bytes that remain.
    const int width = addresses & 1 ? 1 : addresses & 3 ? 2 : addresses & 15 ? 4 : 16;
    const u64 n = bytes / width;
    if (width == 16) copy_as<uint4>(c, job, n);
    else if (width == 4) copy_as<u32>(c, job, n);
    else if (width == 2) copy_as<u16>(c, job, n);
    else copy_as<u8>(c, job, n);
    const u64 rest = n * width + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (rest < bytes)
        for (int t = c.first_target[job]; t < c.first_target[job + 1]; t++) c.targets[t][rest] = c.sources[job][rest];
}
