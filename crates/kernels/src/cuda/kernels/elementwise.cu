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

// a += b
template <class A, class B> struct Add {
    template <int V> struct Regs { Raw<A, V> a; Raw<B, V> b; };
    A* a;
    const B* b;
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

// a[r] += b for every row of a (rows, width)
template <class A, class B> struct AddToRows {
    template <int V> struct Regs { Raw<A, V> a; };
    A* a;
    const B* b;
    i64 width;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const { r.a = load_raw<V>(a + i); }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float x[V], y[V];
        unpack(r.a, x);
        load(b + (i - quotient(i, width) * width), y);
        for (int k = 0; k < V; k++) x[k] += y[k];
        store<V>(a + i, x);
    }
};

// Elements per access, if the larger type has 16 bytes.
template <class A, class B> constexpr int SHARED_WIDTH = WIDTH<A> < WIDTH<B> ? WIDTH<A> : WIDTH<B>;

#define ADD(SUFFIX, A, B)                                                                                              \
    KERNEL add_##SUFFIX(A* a, const B* b, i64 n) {                                                                     \
        constexpr int V = SHARED_WIDTH<A, B>;                                                                          \
        over<V, 2>(Add<A, B>{a, b}, n, aligned<V>(a) && aligned<V>(b));                                                \
    }                                                                                                                  \
    KERNEL add_to_rows_##SUFFIX(A* a, const B* b, i64 rows, i64 width) {                                               \
        constexpr int V = SHARED_WIDTH<A, B>;                                                                          \
        over<V, 2>(AddToRows<A, B>{a, b, width}, rows * width, width % V == 0 && aligned<V>(a) && aligned<V>(b));      \
    }
ADD(f32_f32, float, float)
ADD(f32_bf16, float, bf16)
ADD(bf16_f32, bf16, float)
ADD(bf16_bf16, bf16, bf16)

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
        constexpr int V = SHARED_WIDTH<A, B>;                                                                          \
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
