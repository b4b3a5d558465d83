// Activation functions of the MLP: GELU and SwiGLU.

// ---- GELU ----

template <class T> struct Gelu {
    template <int V> struct Regs { Raw<T, V> x; };
    const T* x;
    T* out;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const { r.x = load_raw<V>(x + i); }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float f[V];
        unpack(r.x, f);
        for (int k = 0; k < V; k++) f[k] *= gelu_sigmoid<T>(f[k]);
        store<V>(out + i, f);
    }
};

template <class T> struct GeluBackward {
    template <int V> struct Regs { Raw<T, V> x, d; };
    const T* x;
    T* d;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        r.x = load_raw<V>(x + i);
        r.d = load_raw<V>(d + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float f[V], g[V];
        unpack(r.x, f);
        unpack(r.d, g);
        for (int k = 0; k < V; k++) g[k] *= gelu_slope<T>(f[k]);
        store<V>(d + i, g);
    }
};

// ---- SwiGLU ----
// Rows of gate and up, (rows, 2f), become silu(gate) up, (rows, f).

template <class T> struct Swiglu {
    template <int V> struct Regs { Raw<T, V> gate, up; };
    const T* gate_up;
    T* out;
    i64 f;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        const T* gate = gate_up + i + quotient(i, f) * f;
        r.gate = load_raw<V>(gate);
        r.up = load_raw<V>(gate + f);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float gate[V], up[V];
        unpack(r.gate, gate);
        unpack(r.up, up);
        for (int k = 0; k < V; k++) gate[k] *= sigmoid<T>(gate[k]) * up[k];
        store<V>(out + i, gate);
    }
};

template <class T> struct SwigluBackward {
    template <int V> struct Regs { Raw<T, V> gate, up, dy; };
    const T *gate_up, *dy;
    T* dgate_up;
    i64 f;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        const T* gate = gate_up + i + quotient(i, f) * f;
        r.gate = load_raw<V>(gate);
        r.up = load_raw<V>(gate + f);
        r.dy = load_raw<V>(dy + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float gate[V], up[V], d[V];
        unpack(r.gate, gate);
        unpack(r.up, up);
        unpack(r.dy, d);
        for (int k = 0; k < V; k++) {
            const float s = sigmoid<T>(gate[k]), silu = gate[k] * s;
            gate[k] = d[k] * fmaf(silu, 1.0f - s, s) * up[k];
            up[k] = d[k] * silu;
        }
        T* to = dgate_up + i + quotient(i, f) * f;
        store<V>(to, gate);
        store<V>(to + f, up);
    }
};

#define ACTIVATIONS(SUFFIX, T)                                                                                         \
    KERNEL gelu_##SUFFIX(const T* x, T* out, i64 n) {                                                                  \
        constexpr int V = WIDTH<T>;                                                                                    \
        over<V, 2>(Gelu<T>{x, out}, n, aligned<V>(x) && aligned<V>(out));                                              \
    }                                                                                                                  \
    KERNEL gelu_backward_##SUFFIX(const T* x, T* d, i64 n) {                                                           \
        constexpr int V = WIDTH<T>;                                                                                    \
        over<V, 2>(GeluBackward<T>{x, d}, n, aligned<V>(x) && aligned<V>(d));                                          \
    }                                                                                                                  \
    KERNEL swiglu_##SUFFIX(const T* gate_up, T* out, i64 rows, i64 f) {                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = f % V == 0 && aligned<V>(gate_up) && aligned<V>(out);                                        \
        over<V, 2>(Swiglu<T>{gate_up, out, f}, rows * f, wide);                                                        \
    }                                                                                                                  \
    KERNEL swiglu_backward_##SUFFIX(const T* gate_up, const T* dy, T* dgate_up, i64 rows, i64 f) {                     \
        constexpr int V = WIDTH<T>;                                                                                    \
        const bool wide = f % V == 0 && aligned<V>(gate_up) && aligned<V>(dy) && aligned<V>(dgate_up);                 \
        over<V, 2>(SwigluBackward<T>{gate_up, dy, dgate_up, f}, rows * f, wide);                                       \
    }
ACTIVATIONS(f32, float)
ACTIVATIONS(bf16, bf16)
