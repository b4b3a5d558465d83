// Fills, casts, sums, and copies of columns.

template <class T> struct Fill {
    template <int V> struct Regs {};
    T* to;
    T value;
    template <int V> DEVICE void read(i64, Regs<V>&) const {}
    template <int V> DEVICE void write(i64 i, Regs<V>&) const {
        if constexpr (V * sizeof(T) == 16) {
            const u32 word = sizeof(T) == 4 ? (u32)value : (u32)value * 0x10001u;
            *(uint4*)(to + i) = make_uint4(word, word, word, word);
        } else {
            to[i] = value;
        }
    }
};

KERNEL fill_u32(u32* to, u32 value, i64 n) { over<4, 4>(Fill<u32>{to, value}, n, aligned<4>(to)); }
KERNEL fill_u16(u16* to, u32 value, i64 n) { over<8, 4>(Fill<u16>{to, (u16)value}, n, aligned<8>(to)); }

template <class A, class B> struct Cast {
    template <int V> struct Regs { Raw<A, V> x; };
    const A* from;
    B* to;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const { r.x = load_raw<V>(from + i); }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float x[V];
        unpack(r.x, x);
        store<V>(to + i, x);
    }
};

#define CAST(NAME, A, B)                                                                                               \
    KERNEL NAME(const A* from, B* to, i64 n) {                                                                         \
        over<4, 4>(Cast<A, B>{from, to}, n, aligned<4>(from) && aligned<4>(to));                                       \
    }
CAST(cast_f32_bf16, float, bf16)
CAST(cast_bf16_f32, bf16, float)

template <class T> struct Add {
    template <int V> struct Regs { Raw<T, V> a, b; };
    T* a;
    const T* b;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        r.a = load_raw<V>(a + i);
        r.b = load_raw<V>(b + i);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float x[V], y[V];
        unpack(r.a, x);
        unpack(r.b, y);
        for (int k = 0; k < V; k++) x[k] += y[k];
        store<V>(a + i, x);
    }
};

KERNEL add_f32(float* a, const float* b, i64 n) { over<4, 2>(Add<float>{a, b}, n, aligned<4>(a) && aligned<4>(b)); }
KERNEL add_bf16(bf16* a, const bf16* b, i64 n) { over<8, 2>(Add<bf16>{a, b}, n, aligned<8>(a) && aligned<8>(b)); }

// A block of columns, (rows, width), of matrices with other widths. `from` and `to` point to its first element.
template <class A, class B, bool ADD> struct Columns {
    template <int V> struct Regs { Raw<A, V> x; Raw<B, V> y; };
    const A* from;
    B* to;
    i64 from_stride, to_stride, width;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const {
        const i64 row = quotient(i, width), column = i - row * width;
        r.x = load_raw<V>(from + row * from_stride + column);
        if (ADD) r.y = load_raw<V>(to + row * to_stride + column);
    }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        const i64 row = quotient(i, width), column = i - row * width;
        float x[V], y[V];
        unpack(r.x, x);
        if (ADD) {
            unpack(r.y, y);
            for (int k = 0; k < V; k++) x[k] += y[k];
        }
        store<V>(to + row * to_stride + column, x);
    }
};

template <int V, class A, class B, bool ADD> DEVICE void columns(const Columns<A, B, ADD>& op, i64 rows) {
    const bool wide = aligned<V>(op.from) && aligned<V>(op.to) && op.width % V == 0 && op.from_stride % V == 0
        && op.to_stride % V == 0;
    over<V, 2>(op, rows * op.width, wide);
}

#define COLUMNS(NAME, A, B, ADD)                                                                                       \
    KERNEL NAME(const A* from, B* to, i64 rows, i64 from_stride, i64 to_stride, i64 width) {                           \
        constexpr int V = sizeof(A) + sizeof(B) == 4 ? 8 : 4;                                                          \
        columns<V>(Columns<A, B, ADD>{from, to, from_stride, to_stride, width}, rows);                                 \
    }
COLUMNS(place_columns_f32_f32, float, float, false)
COLUMNS(place_columns_f32_bf16, float, bf16, false)
COLUMNS(place_columns_bf16_f32, bf16, float, false)
COLUMNS(place_columns_bf16_bf16, bf16, bf16, false)
COLUMNS(add_columns_f32_f32, float, float, true)
COLUMNS(add_columns_f32_bf16, float, bf16, true)
COLUMNS(add_columns_bf16_f32, bf16, float, true)
COLUMNS(add_columns_bf16_bf16, bf16, bf16, true)
