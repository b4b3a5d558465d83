// Rotary position embedding in place, on pairs (i, i + head_dim / 2). The block of a row has threads for V pairs of some
// heads; each thread keeps its cosines and sines for all heads that it rotates.

template <int V, class T>
DEVICE void rotate(T* row, const float* cos, const float* sin, i32 heads, i32 half, float sign) {
    const int runs = half / V, head_step = blockDim.x / runs > 0 ? blockDim.x / runs : 1;
    // Threads beyond a whole number of heads are idle. Wide heads take several turns.
    for (int run = threadIdx.x % runs; run < runs; run += blockDim.x) {
        const int first_head = threadIdx.x / runs;
        if (first_head >= head_step) break;
        float c[V], s[V];
        load(cos + run * V, c);
        load(sin + run * V, s);
        for (int head = first_head; head < heads; head += head_step) {
            T* low = row + (i64)head * 2 * half + run * V;
            float a[V], b[V], x[V], y[V];
            load(low, a);
            load(low + half, b);
            for (int k = 0; k < V; k++) {
                const float turn = s[k] * sign;
                x[k] = a[k] * c[k] - b[k] * turn;
                y[k] = b[k] * c[k] + a[k] * turn;
            }
            store(low, x);
            store(low + half, y);
        }
    }
}

// Row r is at position `start + r % len`.
#define ROPE(NAME, T)                                                                                                  \
    KERNEL __launch_bounds__(256) NAME(                                                                                \
        T* data, const float* cos, const float* sin, i64 rows, i64 stride, i32 heads, i32 half, i64 start, i64 len,    \
        float sign                                                                                                     \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = half % V == 0 && stride % V == 0 && aligned<V>(data) && aligned<4>(cos) && aligned<4>(sin);  \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {                                                     \
            const i64 at = (start + row % len) * half;                                                                 \
            if (wide) rotate<V>(data + row * stride, cos + at, sin + at, heads, half, sign);                           \
            else rotate<1>(data + row * stride, cos + at, sin + at, heads, half, sign);                                \
        }                                                                                                              \
    }
ROPE(rope_f32, float)
ROPE(rope_bf16, bf16)
