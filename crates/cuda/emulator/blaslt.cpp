// cuBLASLt: matrix products on the host. Refuses what the library refuses on a GPU, as far as the backend depends on it.

#include "stream.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, BF16 = 14, E4M3 = 28, E5M2 = 29 };
enum Epilogue { BIAS = 4, GELU = 32, DGELU = 64, AUX = 128 };
enum Attribute {
    TRANSA = 3, TRANSB = 4, EPILOGUE = 7, BIAS_POINTER = 8, AUX_POINTER = 11, AUX_LD = 12, A_SCALE = 17, B_SCALE = 18,
    FAST_ACCUM = 25, BIAS_TYPE = 26
};

struct Description {
    int transposed[2] = {0, 0};
    int epilogue = 1;
    const void* bias = nullptr;
    void* aux = nullptr;
    std::int64_t aux_ld = 0;
    const float* scales[2] = {nullptr, nullptr};
};

// Column-major.
struct Layout {
    int type;
    std::uint64_t rows, cols;
    std::int64_t ld;
};

float from_bf16(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

std::uint16_t to_bf16(float x) {
    if (x != x) return 0x7fff;
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_fp8(unsigned bits, int mantissa, int bias) {
    const int exponent = static_cast<int>(bits >> mantissa & ((1u << (7 - mantissa)) - 1));
    const int fraction = static_cast<int>(bits & ((1u << mantissa) - 1));
    const float size = exponent ? std::ldexp(static_cast<float>(fraction + (1 << mantissa)), exponent - bias - mantissa)
                                : std::ldexp(static_cast<float>(fraction), 1 - bias - mantissa);
    const bool nan = mantissa == 3 ? (bits & 0x7f) == 0x7f : (bits & 0x7f) > 0x7c;
    if (nan) return std::nanf("");
    if (mantissa == 2 && (bits & 0x7f) == 0x7c) return bits & 0x80 ? -INFINITY : INFINITY;
    return bits & 0x80 ? -size : size;
}

float load(const void* from, std::size_t at, int type) {
    switch (type) {
    case F32: return static_cast<const float*>(from)[at];
    case BF16: return from_bf16(static_cast<const std::uint16_t*>(from)[at]);
    case E4M3: return from_fp8(static_cast<const std::uint8_t*>(from)[at], 3, 7);
    default: return from_fp8(static_cast<const std::uint8_t*>(from)[at], 2, 15);
    }
}

void store(void* to, std::size_t at, int type, float x) {
    if (type == F32) static_cast<float*>(to)[at] = x;
    else static_cast<std::uint16_t*>(to)[at] = to_bf16(x);
}

constexpr float SQRT_2_PI = 0.7978845608028654f;

float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(SQRT_2_PI * (x + 0.044715f * x * x * x))); }

float gelu_derivative(float x) {
    const float t = std::tanh(SQRT_2_PI * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * SQRT_2_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

struct Product {
    Description how;
    Layout a_layout, b_layout, out_layout;
    const void *a, *b, *c;
    void* out;
    float alpha, beta;

    void run() const;
};

void Product::run() const {
    const std::size_t m = out_layout.rows, n = out_layout.cols;
    const std::size_t k = how.transposed[0] ? a_layout.rows : a_layout.cols;
    // op(a) in columns of m, so that the inner loop runs along them.
    std::vector<float> left(m * k), sum(m);
    for (std::size_t p = 0; p < k; p++)
        for (std::size_t i = 0; i < m; i++) {
            const std::size_t at = how.transposed[0] ? p + i * a_layout.ld : i + p * a_layout.ld;
            left[i + p * m] = load(a, at, a_layout.type);
        }
    float factor = alpha;
    if (how.scales[0]) factor *= *how.scales[0];
    if (how.scales[1]) factor *= *how.scales[1];
    for (std::size_t j = 0; j < n; j++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (std::size_t p = 0; p < k; p++) {
            const std::size_t at = how.transposed[1] ? j + p * b_layout.ld : p + j * b_layout.ld;
            const float right = load(b, at, b_layout.type);
            const float* column = &left[p * m];
            for (std::size_t i = 0; i < m; i++) sum[i] += column[i] * right;
        }
        for (std::size_t i = 0; i < m; i++) {
            const std::size_t at = i + j * out_layout.ld;
            float x = factor * sum[i];
            if (beta != 0.0f) x += beta * load(c, at, out_layout.type);
            if (how.epilogue & BIAS) x += load(how.bias, i, out_layout.type);
            const std::size_t aux_at = i + j * static_cast<std::size_t>(how.aux_ld);
            if (how.epilogue & GELU) {
                store(how.aux, aux_at, out_layout.type, x);
                x = gelu(x);
            }
            if (how.epilogue & DGELU) x *= gelu_derivative(load(how.aux, aux_at, out_layout.type));
            store(out, at, out_layout.type, x);
        }
        const std::size_t width = out_layout.type == F32 ? 4 : 2, column = m * width;
        emulated_written(static_cast<const char*>(out) + j * out_layout.ld * width, column);
        if (how.epilogue & GELU) emulated_written(static_cast<const char*>(how.aux) + j * how.aux_ld * width, column);
    }
}

bool is_fp8(int type) { return type == E4M3 || type == E5M2; }

// Whether the library has an algorithm.
int check(const Description& how, const Layout& a, const Layout& b, const Layout& out) {
    const std::uint64_t m = how.transposed[0] ? a.cols : a.rows, k = how.transposed[0] ? a.rows : a.cols;
    const std::uint64_t n = how.transposed[1] ? b.rows : b.cols, other = how.transposed[1] ? b.cols : b.rows;
    if (k != other || m != out.rows || n != out.cols) return INVALID_VALUE;
    if (is_fp8(a.type)) {
        const bool shaped = m % 16 == 0 && n % 16 == 0 && k % 16 == 0;
        if (!how.transposed[0] || how.transposed[1] || !shaped || (a.type == E5M2 && b.type == E5M2)) return NOT_SUPPORTED;
    } else if (a.type != b.type || (a.type == F32 && out.type != F32)) {
        return NOT_SUPPORTED;
    }
    if (how.epilogue & (GELU | DGELU)) {
        if (how.aux_ld % 8 != 0) return INVALID_VALUE;
        // Epilogues of GELU need an output of the inputs' type.
        if (!is_fp8(a.type) && out.type != a.type) return NOT_SUPPORTED;
    }
    return SUCCESS;
}

} // namespace

typedef void* Handle;

struct Result {
    std::uint64_t algorithm[8];
    std::size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static int candidate(Handle desc, Handle a, Handle b, Handle out, std::uint64_t number, Result* result) {
    std::memset(result, 0, sizeof *result);
    result->algorithm[0] = number;
    result->state = check(*static_cast<Description*>(desc), *static_cast<Layout*>(a), *static_cast<Layout*>(b), *static_cast<Layout*>(out));
    return result->state;
}

extern "C" {

std::size_t cublasLtGetVersion() { return 130000; }

int cublasLtCreate(Handle* handle) {
    static char only;
    *handle = &only;
    return SUCCESS;
}

int cublasLtMatmulDescCreate(Handle* desc, int, int) {
    *desc = new Description;
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(Handle desc) {
    delete static_cast<Description*>(desc);
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(Handle desc, int attribute, const void* value, std::size_t bytes) {
    auto* how = static_cast<Description*>(desc);
    void* to = nullptr;
    switch (attribute) {
    case TRANSA: to = &how->transposed[0]; break;
    case TRANSB: to = &how->transposed[1]; break;
    case EPILOGUE: to = &how->epilogue; break;
    case BIAS_POINTER: to = &how->bias; break;
    case AUX_POINTER: to = &how->aux; break;
    case AUX_LD: to = &how->aux_ld; break;
    case A_SCALE: to = &how->scales[0]; break;
    case B_SCALE: to = &how->scales[1]; break;
    case FAST_ACCUM:
    case BIAS_TYPE: return SUCCESS;
    default: return INVALID_VALUE;
    }
    std::memcpy(to, value, bytes);
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(Handle* layout, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld) {
    *layout = new Layout{type, rows, cols, ld};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Handle layout) {
    delete static_cast<Layout*>(layout);
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(Handle* preference) {
    *preference = new char;
    return SUCCESS;
}
int cublasLtMatmulPreferenceDestroy(Handle preference) {
    delete static_cast<char*>(preference);
    return SUCCESS;
}
int cublasLtMatmulPreferenceSetAttribute(Handle, int, const void*, std::size_t) { return SUCCESS; }

int cublasLtMatmulAlgoGetHeuristic(Handle, Handle desc, Handle a, Handle b, Handle, Handle out, Handle, int requested,
                                   Result* results, int* found) {
    *found = 0;
    for (int i = 0; i < requested && i < 2; i++) {
        const int status = candidate(desc, a, b, out, static_cast<std::uint64_t>(i) + 1, &results[i]);
        if (status != SUCCESS) return status;
        ++*found;
    }
    return SUCCESS;
}

int cublasLtMatmulAlgoCheck(Handle, Handle desc, Handle a, Handle b, Handle, Handle out, const std::uint64_t* algorithm,
                            Result* result) {
    return candidate(desc, a, b, out, algorithm[0], result);
}

int cublasLtMatmul(Handle, Handle desc, const void* alpha, const void* a, Handle a_layout, const void* b, Handle b_layout,
                   const void* beta, const void* c, Handle, void* out, Handle out_layout, const std::uint64_t*, void*,
                   std::size_t, Handle stream) {
    auto* product = new Product{*static_cast<Description*>(desc), *static_cast<Layout*>(a_layout), *static_cast<Layout*>(b_layout),
                                *static_cast<Layout*>(out_layout), a, b, c, out,
                                *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    const int status = check(product->how, product->a_layout, product->b_layout, product->out_layout);
    if (status != SUCCESS) {
        delete product;
        return status;
    }
    emulated_enqueue(stream, [](void* state) { static_cast<Product*>(state)->run(); },
                     [](void* state) { delete static_cast<Product*>(state); }, product);
    return SUCCESS;
}
}
