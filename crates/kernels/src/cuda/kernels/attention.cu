// Small kernels of attention: delta and merge.

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
