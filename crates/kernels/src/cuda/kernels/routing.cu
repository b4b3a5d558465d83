// Mixture of experts: routing, load balancing, and moving rows to experts and back.

constexpr u32 DROPPED = 0xffffffffu;

// ---- router ----

// A token per warp. The next expert is the most probable one after the last in the order of falling probability and
// rising index.
KERNEL route(
    const float* logits, float* probs, float* log_sum, u32* chosen, float* weights, i64 tokens, i32 experts, i32 top_k,
    i32 renormalize
) {
    const int lane = threadIdx.x & 31;
    const i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    logits += token * experts, probs += token * experts, chosen += token * top_k, weights += token * top_k;
    float max = -infinity();
    for (int e = lane; e < experts; e += 32) max = fmaxf(max, logits[e]);
    max = warp_reduce(max, Largest{});
    float sum = 0.0f;
    for (int e = lane; e < experts; e += 32) sum += expf(logits[e] - max);
    sum = warp_sum(sum);
    for (int e = lane; e < experts; e += 32) probs[e] = expf(logits[e] - max) / sum;
    if (lane == 0) log_sum[token] = logf(sum) + max;
    __syncwarp();

    float last = infinity(), all = 0.0f;
    int last_expert = -1;
    for (int j = 0; j < top_k; j++) {
        float best = -1.0f;
        int expert = experts;
        for (int e = lane; e < experts; e += 32) {
            const float p = probs[e];
            if ((p < last || (p == last && e > last_expert)) && p > best) best = p, expert = e;
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, best, offset);
            const int other_expert = __shfl_xor_sync(ALL_LANES, expert, offset);
            if (other > best || (other == best && other_expert < expert)) best = other, expert = other_expert;
        }
        // All probabilities are NaN.
        if (expert == experts) expert = j, best = not_a_number();
        if (lane == 0) chosen[j] = expert, weights[j] = best;
        last = best, last_expert = expert;
        all += best;
    }
    __syncwarp();
    if (renormalize)
        for (int j = lane; j < top_k; j += 32) weights[j] /= all;
}

// A token per warp. The gradient of the probabilities is computed twice instead of stored.
KERNEL route_backward(
    const float* probs, const float* log_sum, const u32* chosen, const float* weights, const float* dweights,
    const float* balance, float* dlogits, i64 tokens, i32 experts, i32 top_k, i32 renormalize, i64 scope, float z_loss
) {
    const int lane = threadIdx.x & 31;
    const i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    probs += token * experts, dlogits += token * experts;
    chosen += token * top_k, weights += token * top_k, dweights += token * top_k;
    if (balance) balance += token / scope * experts;
    float along = 0.0f, all = 0.0f;
    for (int j = 0; j < top_k; j++) {
        along = fmaf(weights[j], dweights[j], along);
        all += probs[chosen[j]];
    }
    auto gradient = [&](int e) {
        float d = balance ? balance[e] : 0.0f;
        for (int j = 0; j < top_k; j++)
            if (chosen[j] == e) d += renormalize ? (dweights[j] - along) / all : dweights[j];
        return d;
    };
    float mean = 0.0f;
    for (int e = lane; e < experts; e += 32) mean = fmaf(probs[e], gradient(e), mean);
    mean = warp_sum(mean);
    // The z-loss contributes d(lse²) = 2 lse p.
    const float offset = 2.0f * z_loss * log_sum[token] - mean;
    for (int e = lane; e < experts; e += 32) dlogits[e] = probs[e] * (gradient(e) + offset);
}

// ---- load balancing ----

// counts[scope][expert], as integers. A block counts a part of a scope: blockIdx.y is the scope.
KERNEL __launch_bounds__(256) count_experts(const u32* chosen, u32* counts, i64 slots_per_scope, i32 experts) {
    extern __shared__ u32 shared[];
    for (int e = threadIdx.x; e < experts; e += blockDim.x) shared[e] = 0;
    __syncthreads();
    chosen += blockIdx.y * slots_per_scope;
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < slots_per_scope; i += step)
        if (chosen[i] < experts) atomicAdd(&shared[chosen[i]], 1u);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        if (shared[e]) atomicAdd(&counts[(i64)blockIdx.y * experts + e], shared[e]);
}

KERNEL add_counts(const u32* from, float* to, i64 n) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] += (float)from[i];
}

// Number of tokens of a scope, by one warp: the sum of its counts, which are integers, divided by top_k.
DEVICE double tokens_of(const float* counts, i32 experts, i32 top_k) {
    double slots = 0.0;
    for (int e = threadIdx.x & 31; e < experts; e += 32) slots += (double)counts[e];
    return warp_sum(slots) / (double)top_k;
}

// Mean over scopes of experts Σ (count / tokens) (sum / tokens). One block; a scope per warp.
KERNEL __launch_bounds__(1024) balance_loss(
    const float* counts, const float* sums, double* loss, i64 scopes, i32 experts, i32 top_k
) {
    __shared__ double shared[32];
    const int lane = threadIdx.x & 31;
    double all = 0.0;
    for (i64 scope = threadIdx.x / 32; scope < scopes; scope += blockDim.x / 32) {
        const float *n = counts + scope * experts, *sum = sums + scope * experts;
        const double tokens = tokens_of(n, experts, top_k);
        double own = 0.0;
        for (int e = lane; e < experts; e += 32) own += (double)n[e] / tokens * ((double)sum[e] / tokens);
        own = warp_sum(own);
        if (lane == 0 && tokens > 0.0) all += experts * own;
    }
    all = block_sum(all, shared);
    if (threadIdx.x == 0) *loss = all / (double)scopes;
}

// A scope per block of one warp.
KERNEL balance_gradient(const float* counts, float* gradient, i32 experts, i32 top_k, float weight) {
    counts += (i64)blockIdx.x * experts, gradient += (i64)blockIdx.x * experts;
    const double tokens = tokens_of(counts, experts, top_k), factor = tokens > 0.0 ? (double)experts / tokens : 0.0;
    for (int e = threadIdx.x & 31; e < experts; e += 32)
        gradient[e] = (float)((double)weight * factor * (double)counts[e]);
}

// ---- grouping of slots ----
// A stable counting sort of slots by expert. Tiles of slots are within one scope; a tile is a block of one warp.

struct Tile {
    i64 begin, end;
    DEVICE Tile(i64 scope_slots, i64 tile_slots, i64 tiles_per_scope) {
        const i64 scope = blockIdx.x / tiles_per_scope, within = blockIdx.x % tiles_per_scope;
        begin = scope * scope_slots + within * tile_slots;
        end = min(begin + tile_slots, (scope + 1) * scope_slots);
    }
};

// Calls `visit` with each slot of the tile, its expert, and the number of slots of the same expert before it in the tile.
// `counts` (experts), in shared memory, ends as the number of slots of each expert.
template <class F> DEVICE void each_slot(const u32* chosen, const Tile& tile, i32 experts, u32* counts, F visit) {
    const int lane = threadIdx.x & 31;
    for (int e = lane; e < experts; e += 32) counts[e] = 0;
    __syncwarp();
    for (i64 base = tile.begin; base < tile.end; base += 32) {
        const i64 slot = base + lane;
        const bool valid = slot < tile.end && chosen[slot] < experts;
        const u32 expert = valid ? chosen[slot] : DROPPED;
        const u32 same = __match_any_sync(ALL_LANES, expert);
        const u32 before = __popc(same & ((1u << lane) - 1));
        if (valid) visit(slot, expert, counts[expert] + before);
        __syncwarp();
        if (valid && before == 0) counts[expert] += __popc(same);
        __syncwarp();
    }
}

// counts[tile][expert]
KERNEL __launch_bounds__(32) group_count(
    const u32* chosen, u32* counts, i64 scope_slots, i64 tile_slots, i64 tiles_per_scope, i32 experts
) {
    extern __shared__ u32 shared[];
    const Tile tile(scope_slots, tile_slots, tiles_per_scope);
    each_slot(chosen, tile, experts, shared, [](i64, u32, u32) {});
    for (int e = threadIdx.x; e < experts; e += 32) counts[(i64)blockIdx.x * experts + e] = shared[e];
}

// Replaces the counts of each tile by the number of slots before it in its scope, and writes the number of places that
// the scopes before it fill. `starts` becomes the first place of each expert. One block.
KERNEL __launch_bounds__(1024) group_places(
    u32* counts, u32* filled, u32* starts, i64 scopes, i64 tiles_per_scope, i32 experts, u32 limit
) {
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        u32 places = 0;
        for (i64 scope = 0; scope < scopes; scope++) {
            u32 seen = 0;
#pragma unroll 4
            for (i64 tile = scope * tiles_per_scope; tile < (scope + 1) * tiles_per_scope; tile++) {
                const u32 count = counts[tile * experts + e];
                counts[tile * experts + e] = seen;
                filled[tile * experts + e] = places;
                seen += count;
            }
            places += umin(seen, limit);
        }
        starts[e + 1] = places;
    }
    __syncthreads();
    __shared__ u32 shared[32];
    u32 before = 0;
    if (threadIdx.x == 0) starts[0] = 0;
    for (int base = 0; base < experts; base += blockDim.x) {
        const int e = base + threadIdx.x;
        const u32 own = e < experts ? starts[e + 1] : 0;
        u32 total;
        const u32 sum = block_sum_before(own, shared, total);
        if (e < experts) starts[e + 1] = before + sum + own;
        before += total;
    }
}

KERNEL __launch_bounds__(32) group_slots(
    const u32* chosen, const u32* seen, const u32* filled, const u32* starts, u32* order, u32* place, i64 scope_slots,
    i64 tile_slots, i64 tiles_per_scope, i32 experts, u32 limit
) {
    extern __shared__ u32 shared[];
    const Tile tile(scope_slots, tile_slots, tiles_per_scope);
    each_slot(chosen, tile, experts, shared, [&](i64 slot, u32 expert, u32 rank) {
        const i64 at = (i64)blockIdx.x * experts + expert;
        const u32 in_scope = seen[at] + rank;
        const u32 to = in_scope < limit ? starts[expert] + filled[at] + in_scope : DROPPED;
        place[slot] = to;
        if (to != DROPPED) order[to] = (u32)slot;
    });
}

// ---- rows ----

// out[i] = x[order[i] / top_k]; zeros for an empty place. A row per warp.
template <int V, class T> DEVICE void gather(const T* x, const u32* order, T* out, i64 row, i64 dim, i32 top_k) {
    const u32 slot = order[row];
    const T* from = x + (i64)(slot / top_k) * dim;
#pragma unroll 4
    for (i64 c = (threadIdx.x & 31) * V; c < dim; c += 32 * V) {
        Raw<T, V> value = {};
        if (slot != DROPPED) value = load_raw<V>(from + c);
        store_raw(out + row * dim + c, value);
    }
}

// out[token] = Σ weight row over the token's slots. A token per warp.
template <int V, class T> DEVICE void combine(
    const T* rows, const u32* place, const float* weights, T* out, i64 token, i64 dim, i32 top_k, bool add
) {
    place += token * top_k;
    for (i64 c = (threadIdx.x & 31) * V; c < dim; c += 32 * V) {
        float sum[V] = {};
        for (int j = 0; j < top_k; j++) {
            if (place[j] == DROPPED) continue;
            const float weight = weights ? weights[token * top_k + j] : 1.0f;
            float f[V];
            load(rows + (i64)place[j] * dim + c, f);
            for (int k = 0; k < V; k++) sum[k] = fmaf(weight, f[k], sum[k]);
        }
        if (add) {
            float old[V];
            load(out + token * dim + c, old);
            for (int k = 0; k < V; k++) sum[k] += old[k];
        }
        store(out + token * dim + c, sum);
    }
}

template <int V, class T> DEVICE float row_dot(const T* a, const T* b, i64 row, i64 dim) {
    float sum = 0.0f;
#pragma unroll 4
    for (i64 c = (threadIdx.x & 31) * V; c < dim; c += 32 * V) {
        float f[V], g[V];
        load(a + row * dim + c, f);
        load(b + row * dim + c, g);
        for (int k = 0; k < V; k++) sum = fmaf(f[k], g[k], sum);
    }
    return warp_sum(sum);
}

template <class T> struct ScaleRows {
    template <int V> struct Regs { Raw<T, V> x; };
    T* rows;
    const float* factors;
    i64 dim;
    template <int V> DEVICE void read(i64 i, Regs<V>& r) const { r.x = load_raw<V>(rows + i); }
    template <int V> DEVICE void write(i64 i, Regs<V>& r) const {
        float f[V];
        unpack(r.x, f);
        const float factor = factors[quotient(i, dim)];
        for (int k = 0; k < V; k++) f[k] *= factor;
        store<V>(rows + i, f);
    }
};

#define ROWS(SUFFIX, T)                                                                                                \
    KERNEL gather_##SUFFIX(const T* x, const u32* order, T* out, i64 places, i64 dim, i32 top_k) {                     \
        constexpr int V = WIDTH<T>;                                                                                    \
        const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;                                        \
        if (row >= places) return;                                                                                     \
        if (dim % V == 0 && aligned<V>(x) && aligned<V>(out)) gather<V>(x, order, out, row, dim, top_k);               \
        else gather<1>(x, order, out, row, dim, top_k);                                                                \
    }                                                                                                                  \
    KERNEL combine_##SUFFIX(                                                                                           \
        const T* rows, const u32* place, const float* weights, T* out, i64 tokens, i64 dim, i32 top_k, i32 add         \
    ) {                                                                                                                \
        constexpr int V = WIDTH<T>;                                                                                    \
        const i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;                                      \
        if (token >= tokens) return;                                                                                   \
        const bool wide = dim % V == 0 && aligned<V>(rows) && aligned<V>(out);                                         \
        if (wide) combine<V>(rows, place, weights, out, token, dim, top_k, add);                                       \
        else combine<1>(rows, place, weights, out, token, dim, top_k, add);                                            \
    }                                                                                                                  \
    KERNEL row_dots_##SUFFIX(const T* a, const T* b, float* out, i64 rows, i64 dim) {                                  \
        constexpr int V = WIDTH<T>;                                                                                    \
        const i64 row = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;                                        \
        if (row >= rows) return;                                                                                       \
        const bool wide = dim % V == 0 && aligned<V>(a) && aligned<V>(b);                                              \
        const float dot = wide ? row_dot<V>(a, b, row, dim) : row_dot<1>(a, b, row, dim);                              \
        if ((threadIdx.x & 31) == 0) out[row] = dot;                                                                   \
    }                                                                                                                  \
    KERNEL scale_rows_##SUFFIX(T* rows, const float* factors, i64 count, i64 dim) {                                    \
        constexpr int V = WIDTH<T>;                                                                                    \
        over<V, 2>(ScaleRows<T>{rows, factors, dim}, count * dim, dim % V == 0 && aligned<V>(rows));                   \
    }
ROWS(f32, float)
ROWS(bf16, bf16)
