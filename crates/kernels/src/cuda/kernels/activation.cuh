// Activation functions: GELU in the tanh form of GPT-2, computed as x σ(2u), and the sigmoid of SwiGLU.

template <class T> DEVICE float sigmoid(float x) {
    // Uses e^-|x|, which cannot overflow.
    const float small = exp_for<T>(-fabsf(x));
    return divide_for<T>(x < 0.0f ? small : 1.0f, 1.0f + small);
}

// ---- GELU ----

// 2√(2/π): scale of the sigmoid's argument.
constexpr float SCALE = 1.595769f;
constexpr float CUBE = 0.044715f;

template <class T> DEVICE float gelu_sigmoid(float x) { return sigmoid<T>(x * fmaf(x * x, SCALE * CUBE, SCALE)); }

template <class T> DEVICE float gelu_slope(float x) {
    // Beyond ±12 the slope is 0 or 1; clamping keeps x² from overflowing. A NaN stays a NaN.
    const float above = x < -12.0f ? -12.0f : x, near = above > 12.0f ? 12.0f : above;
    const float s = gelu_sigmoid<T>(near);
    return fmaf(near * s * (1.0f - s), fmaf(near * near, 3.0f * SCALE * CUBE, SCALE), s);
}
