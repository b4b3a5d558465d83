// Causal grouped-query attention for shapes that cuDNN does not take, tile by tile (FlashAttention-2, Dao 2023).
// f32 is computed by FMA, bf16 by tensor cores with f32 sums. Every sum has a fixed order: one block owns its
// results, and there are no atomics.
//
// Query i attends to key j if j <= i + shift, where shift = q_start - k_start. A query without visible keys gets
// zeros, and a log-sum-exp of -inf.
//
// Rows of q, k, v and their gradients: token t starts at t * stride, head h at + h * head_dim.
// out and dout: (batch * q_len, heads * head_dim). lse: (batch * heads, q_len). delta: (batch * q_len, heads).

namespace attention {

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.693147180559945309417f;
// Initial maximum of the scores: below every score, and finite so that inf - inf never occurs.
constexpr float INITIAL_MAX = -1e30f;

struct Shape {
    int heads, group, head_dim, q_len, k_len;
    i64 shift;
    float scale;

    // Number of keys that a query attends to.
    __device__ int visible_keys(int query) const {
        i64 keys = query + shift + 1;
        return keys < 0 ? 0 : keys > k_len ? k_len : (int)keys;
    }

    // First query that attends to a key; may be past the last one.
    __device__ int first_query(int key) const {
        i64 query = key - shift;
        return query < 0 ? 0 : query > q_len ? q_len : (int)query;
    }
};

template <class E> struct Qkv {
    const E* q;
    i64 q_stride;
    const E* k;
    i64 k_stride;
    const E* v;
    i64 v_stride;
};

// What the backward pass needs of the forward pass, and the gradient of its output.
template <class E> struct Saved {
    const E* dout;
    const float *lse, *delta;
};

// Rows of a result: bf16 or f32, overwritten or added to.
struct Target {
    void* data;
    i64 stride;
    int is_f32, accumulate;

    __device__ void store(i64 row, i64 column, float value) const {
        i64 at = row * stride + column;
        if (!is_f32) {
            ((bf16*)data)[at] = from_float<bf16>(value);
        } else if (accumulate) {
            ((float*)data)[at] += value;
        } else {
            ((float*)data)[at] = value;
        }
    }
};

// The part of a result that one block computes: a tile of rows of one head of one sequence.
struct Place {
    i64 batch;
    int head, tile;

    __device__ Place(int heads, int tiles) {
        tile = blockIdx.x % tiles;
        head = blockIdx.x / tiles % heads;
        batch = blockIdx.x / tiles / heads;
    }
};

DEVICE int tiles_of(int len, int size) { return (len + size - 1) / size; }

// Log-sum-exp in powers of two, inf for a query without visible keys, so that its probabilities are zero.
DEVICE float log2_sum(float lse) { return lse == -infinity() ? infinity() : lse * LOG2_E; }

} // namespace attention

#define SHAPE_PARAMS int heads, int group, int head_dim, int q_len, int k_len, i64 shift, float scale
#define SHAPE attention::Shape{heads, group, head_dim, q_len, k_len, shift, scale}
#define QKV_PARAMS(E) const E *q, i64 q_stride, const E *k, i64 k_stride, const E *v, i64 v_stride
#define QKV(E) attention::Qkv<E>{q, q_stride, k, k_stride, v, v_stride}
#define SAVED_PARAMS(E) const E *dout, const float *lse, const float *delta
#define SAVED(E) attention::Saved<E>{dout, lse, delta}
