// Small kernels of attention: delta, merge, and what surrounds the graphs of cuDNN.

namespace attention {

// A warp per element of a (rows, heads) matrix.
DEVICE i64 warp_index() { return (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }

// delta = Σ dout · out of each head of each token.
template <class E>
__device__ void delta_of(const E* out, const E* dout, float* delta, i64 count, int dim) {
    i64 at = warp_index();
    if (at >= count) return;
    float sum = 0.0f;
    for (int d = threadIdx.x % 32; d < dim; d += 32) sum += to_float(out[at * dim + d]) * to_float(dout[at * dim + d]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[at] = sum;
}

} // namespace attention

KERNEL attention_delta_f32(
    const float* out, const float* dout, float* delta, i64 count, int head_dim
) {
    attention::delta_of(out, dout, delta, count, head_dim);
}

KERNEL attention_delta_bf16(
    const bf16* out, const bf16* dout, float* delta, i64 count, int head_dim
) {
    attention::delta_of(out, dout, delta, count, head_dim);
}

// Merges the attention over another block of keys by log-sum-exp. A warp per head of each token; count = batch *
// q_len * heads.
KERNEL attention_merge_f32(
    float* out, float* lse, const float* other_out, const float* other_lse, i64 count, int heads, int q_len,
    int head_dim
) {
    i64 at = attention::warp_index();
    if (at >= count) return;
    i64 token = at / heads, head = at % heads;
    i64 place = (token / q_len * heads + head) * q_len + token % q_len;
    float ours = lse[place], theirs = other_lse[place];
    __syncwarp();
    float more = fmaxf(ours, theirs), less = fminf(ours, theirs);
    if (more == -infinity()) return;
    float both = more + log1pf(expf(less - more));
    float here = expf(ours - both), there = expf(theirs - both);
    for (int d = threadIdx.x % 32; d < head_dim; d += 32) {
        i64 i = at * head_dim + d;
        out[i] = out[i] * here + other_out[i] * there;
    }
    if (threadIdx.x % 32 == 0) lse[place] = both;
}

// Adds rows of bf16 to the first columns of rows of f32, or overwrites them. A block per row.
KERNEL attention_add_bf16(const bf16* from, float* to, i64 to_stride, int width, int accumulate) {
    from += (i64)blockIdx.x * width;
    to += (i64)blockIdx.x * to_stride;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float x = to_float(from[i]);
        to[i] = accumulate ? to[i] + x : x;
    }
}

// An output with Σ dout · out = delta, for graphs that take the output and use nothing else of it. Three elements per
// head carry the sum: each takes what the rounding of the one before has left. A warp per head of each token.
KERNEL attention_stand_in_bf16(const bf16* dout, const float* delta, bf16* out, i64 count, int head_dim) {
    i64 at = attention::warp_index();
    if (at >= count) return;
    dout += at * head_dim, out += at * head_dim;
    int lane = threadIdx.x % 32;
    for (int d = lane; d < head_dim; d += 32) out[d] = from_float<bf16>(0.0f);
    float rest = delta[at], largest = infinity();
    for (int step = 0; step < 3; step++) {
        // The largest |dout| that has not been used, and its first place.
        float most = 0.0f;
        int place = head_dim;
        for (int d = lane; d < head_dim; d += 32) {
            float size = fabsf(to_float(dout[d]));
            if (size < largest && size > most) most = size, place = d;
        }
        float all = warp_reduce(most, Largest{});
        if (!(all > 0.0f)) break;
        int first = most == all ? place : head_dim;
        for (int offset = 16; offset > 0; offset /= 2) first = min(first, __shfl_xor_sync(ALL_LANES, first, offset));
        largest = all;
        float factor = to_float(dout[first]), share = rest / factor;
        if (fabsf(share) > 1e30f) break;
        bf16 rounded = from_float<bf16>(share);
        rest -= factor * to_float(rounded);
        __syncwarp();
        if (lane == 0) out[first] = rounded;
        __syncwarp();
    }
}
