// AdamW in one pass over memory, with the arithmetic of the CPU.

// Elements that decay and elements that do not take turns, changing at these indices.
constexpr int MOST_TURNS = 12;

struct Turns {
    i64 at[MOST_TURNS];
    bool first;
    // Turns up to element i.
    DEVICE int before(i64 i) const {
        int count = 0;
#pragma unroll
        for (int t = 0; t < MOST_TURNS; t++) count += i >= at[t];
        return count;
    }
    // Whether element i decays.
    DEVICE bool decays(i64 i) const { return first ^ (before(i) & 1); }
};

struct Factors {
    float decay, one_minus_beta1, beta2, one_minus_beta2, step_size, correction2, eps, scale;
};

template <class G, bool COPY> struct AdamW {
    template <int V> struct Regs { Raw<float, V> p, m, v; Raw<G, V> g; };
    float *p, *m, *v;
    const G* g;
    bf16* copy;
    Factors f;
    Turns turns;
    i64 first; // index of p[0]
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        r.g = stream_raw<V>(g + i);
        r.p = stream_raw<V>(p + i);
        r.m = stream_raw<V>(m + i);
        r.v = stream_raw<V>(v + i);
    }
    // `decay(k)` is the factor of parameter k.
    template <int V, class Decay> DEVICE void write(i64 i, Regs<V>& r, Decay decay) const {
        float P[V], M[V], S[V], grad[V];
        unpack(r.p, P);
        unpack(r.m, M);
        unpack(r.v, S);
        unpack(r.g, grad);
        for (int k = 0; k < V; k++) {
            const float d = __fmul_rn(grad[k], f.scale);
            M[k] = fmaf(__fsub_rn(d, M[k]), f.one_minus_beta1, M[k]);
            S[k] = fmaf(__fmul_rn(d, d), f.one_minus_beta2, __fmul_rn(S[k], f.beta2));
            const float denominator = fmaf(__fsqrt_rn(S[k]), f.correction2, f.eps);
            P[k] = fmaf(-f.step_size, __fdiv_rn(M[k], denominator), __fmul_rn(P[k], decay(k)));
        }
        store_stream<V>(p + i, P);
        store_stream<V>(m + i, M);
        store_stream<V>(v + i, S);
        // The next forward pass reads the copy.
        if (COPY) store<V>(copy + i, P);
    }
    DEVICE float decay_of(i64 i) const { return turns.decays(first + i) ? f.decay : 1.0f; }
};

// A vector of V elements per thread at a time. Most blocks have no turn among their elements, which is decided once.
template <int V, class Op> DEVICE void adamw_vectors(const Op& op, i64 n) {
    const i64 vectors = n / V;
    for (i64 begin = (i64)blockIdx.x * blockDim.x; begin < vectors; begin += (i64)gridDim.x * blockDim.x) {
        const i64 at = begin + threadIdx.x, i = at * V;
        typename Op::template Regs<V> regs;
        if (at < vectors) op.read(i, regs);
        const i64 last = (begin + blockDim.x) * V - 1;
        const bool constant = op.turns.before(op.first + begin * V) == op.turns.before(op.first + last);
        const float decay = op.decay_of(begin * V);
        if (at < vectors) {
            if (constant) op.write(i, regs, [=](int) { return decay; });
            else op.write(i, regs, [&](int k) { return op.decay_of(i + k); });
        }
    }
}

// Elements from `begin` to `end`, of which there are less than a vector, one per thread.
template <class Op> DEVICE void adamw_rest(const Op& op, i64 begin, i64 end) {
    const i64 i = begin + (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= end) return;
    typename Op::template Regs<1> regs;
    op.read(i, regs);
    op.write(i, regs, [&](int) { return op.decay_of(i); });
}

// The first `head` elements are updated one by one, so that all addresses of the others are aligned.
template <class Op> DEVICE void adamw(Op op, i64 n) {
    const i64 head = min((i64)((16 - ((u64)op.p & 15)) / 4 % 4), n);
    adamw_rest(op, 0, head);
    op.p += head, op.m += head, op.v += head, op.g += head, op.first += head;
    if (op.copy) op.copy += head;
    n -= head;
    const bool wide = aligned<4>(op.p) && aligned<4>(op.m) && aligned<4>(op.v) && aligned<4>(op.g) && aligned<4>(op.copy);
    if (wide) {
        adamw_vectors<4>(op, n);
        adamw_rest(op, n / 4 * 4, n);
    } else {
        adamw_vectors<1>(op, n);
    }
}

#define ADAMW(NAME, G, COPY)                                                                                           \
    KERNEL __launch_bounds__(256) NAME(                                                                                \
        float* p, float* m, float* v, const G* g, bf16* copy, i64 n, float decay, float one_minus_beta1, float beta2,  \
        float one_minus_beta2, float step_size, float correction2, float eps, float scale, bool first_decays,          \
        i64 t0, i64 t1, i64 t2, i64 t3, i64 t4, i64 t5, i64 t6, i64 t7, i64 t8, i64 t9, i64 t10, i64 t11               \
    ) {                                                                                                                \
        const Turns turns = {{t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11}, first_decays};                        \
        const Factors f = {decay, one_minus_beta1, beta2, one_minus_beta2, step_size, correction2, eps, scale};        \
        adamw(AdamW<G, COPY>{p, m, v, g, copy, f, turns, 0}, n);                                                       \
    }
ADAMW(adamw_f32, float, false)
ADAMW(adamw_bf16, bf16, false)
ADAMW(adamw_and_copy_f32, float, true)
ADAMW(adamw_and_copy_bf16, bf16, true)
