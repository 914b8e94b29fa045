// Operations on one place after the other, with torch's meaning: operands are widened, the result
// is rounded once to its dtype. See dense.h.

#include <cmath>
#include <complex>

#include "dense_values.h"
#include "exponential.h"

namespace {

float natural_power(float x) { return exponential(x); }
double natural_power(double x) { return std::exp(x); }

template <class T>
T to_power(T value, double exponent) {
    return T(std::pow(value, T(exponent)));
}

// No number wins, as in torch.
template <class T>
T greater_of(T a, T b) {
    return a != a ? a : b != b ? b : a > b ? a : b;
}

template <class T>
T less_of(T a, T b) {
    return a != a ? a : b != b ? b : a < b ? a : b;
}

template <class T, class F>
void each(const T* a, T* out, int count, F f) {
    for (int i = 0; i < count; i++) out[i] = f(a[i]);
}

template <class T, class F>
void each(const T* a, const T* b, T* out, int count, F f) {
    for (int i = 0; i < count; i++) out[i] = f(a[i], b[i]);
}

template <class T>
void raise(const T* a, T* out, int count, double exponent) {
    if (exponent == 2.0) return each(a, out, count, [](T v) { return v * v; });
    if (exponent == 3.0) return each(a, out, count, [](T v) { return v * v * v; });
    if (exponent == 0.5) return each(a, out, count, [](T v) { return std::sqrt(v); });
    if (exponent == -0.5) return each(a, out, count, [](T v) { return 1 / std::sqrt(v); });
    if (exponent == -1.0) return each(a, out, count, [](T v) { return 1 / v; });
    each(a, out, count, [exponent](T v) { return to_power(v, exponent); });
}

template <class T>
void compute(const HrOp& op, const T* a, const T* b, const T* c, T* out, int n) {
    switch (op.code) {
        case HR_OP_COPY: return each(a, out, n, [](T v) { return v; });
        case HR_OP_NEG: return each(a, out, n, [](T v) { return -v; });
        case HR_OP_ABS: return each(a, out, n, [](T v) { return std::fabs(v); });
        case HR_OP_EXP: return each(a, out, n, [](T v) { return natural_power(v); });
        case HR_OP_SIN: return each(a, out, n, [](T v) { return std::sin(v); });
        case HR_OP_COS: return each(a, out, n, [](T v) { return std::cos(v); });
        case HR_OP_SQRT: return each(a, out, n, [](T v) { return std::sqrt(v); });
        case HR_OP_RSQRT: return each(a, out, n, [](T v) { return 1 / std::sqrt(v); });
        case HR_OP_RECIPROCAL: return each(a, out, n, [](T v) { return 1 / v; });
        case HR_OP_SIGMOID:
            return each(a, out, n, [](T v) { return 1 / (1 + natural_power(-v)); });
        case HR_OP_SILU: return each(a, out, n, [](T v) { return v / (1 + natural_power(-v)); });
        case HR_OP_TANH: return each(a, out, n, [](T v) { return std::tanh(v); });
        case HR_OP_RELU: return each(a, out, n, [](T v) { return v < 0 ? T(0) : v; });
        case HR_OP_SQUARE: return each(a, out, n, [](T v) { return v * v; });
        case HR_OP_POW: return raise(a, out, n, op.x);
        case HR_OP_CLAMP: {
            const T low = T(op.x), high = T(op.y);
            return each(a, out, n, [=](T v) { return v < low ? low : v > high ? high : v; });
        }
        case HR_OP_NOT: return each(a, out, n, [](T v) { return T(v == 0); });
        case HR_OP_ADD: return each(a, b, out, n, [](T v, T w) { return v + w; });
        case HR_OP_SUB: return each(a, b, out, n, [](T v, T w) { return v - w; });
        case HR_OP_MUL: return each(a, b, out, n, [](T v, T w) { return v * w; });
        case HR_OP_DIV: return each(a, b, out, n, [](T v, T w) { return v / w; });
        case HR_OP_MAXIMUM: return each(a, b, out, n, [](T v, T w) { return greater_of(v, w); });
        case HR_OP_MINIMUM: return each(a, b, out, n, [](T v, T w) { return less_of(v, w); });
        case HR_OP_GT: return each(a, b, out, n, [](T v, T w) { return T(v > w); });
        case HR_OP_GE: return each(a, b, out, n, [](T v, T w) { return T(v >= w); });
        case HR_OP_LT: return each(a, b, out, n, [](T v, T w) { return T(v < w); });
        case HR_OP_LE: return each(a, b, out, n, [](T v, T w) { return T(v <= w); });
        case HR_OP_EQ: return each(a, b, out, n, [](T v, T w) { return T(v == w); });
        case HR_OP_NE: return each(a, b, out, n, [](T v, T w) { return T(v != w); });
        case HR_OP_WHERE:
            for (int i = 0; i < n; i++) out[i] = a[i] != 0 ? b[i] : c[i];
            return;
        default: return;
    }
}

template <class T>
void run_real(const DenseRun& run, const HrOp& op) {
    const int inner = op.num_dims - 1;
    const int64_t width = op.sizes[inner];
    const HrOperand* const operands[4] = {&op.out, &op.a, &op.b, &op.c};
    char* bases[4];
    int64_t items[4];
    const int num_used = op.code == HR_OP_WHERE ? 4 : op.code >= HR_OP_ADD ? 3 : 2;
    for (int k = 0; k < num_used; k++) {
        bases[k] = run.at(*operands[k]);
        items[k] = bytes_of(operands[k]->dtype);
    }
    T buffers[4][CHUNK];
    for (int k = 1; k < num_used; k++)
        if (operands[k]->dtype == HR_NO_VALUE)
            for (int i = 0; i < CHUNK; i++) buffers[k][i] = T(op.x);
    const bool is_direct = sizeof(T) == sizeof(float) && op.out.dtype == HR_VALUE_FLOAT32 &&
                           op.out.strides[inner] == 1;
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        for (int64_t begin = 0; begin < width; begin += CHUNK) {
            const int count = int(width - begin < CHUNK ? width - begin : CHUNK);
            const T* values[4] = {};
            for (int k = 1; k < num_used; k++) {
                const HrOperand& of = *operands[k];
                values[k] = buffers[k];
                if (of.dtype != HR_NO_VALUE)
                    values[k] = widen_values<T>(
                        of.dtype, bases[k] + (offsets[k] + begin * of.strides[inner]) * items[k],
                        of.strides[inner], count, buffers[k]);
            }
            char* target = bases[0] + (offsets[0] + begin * op.out.strides[inner]) * items[0];
            T* out = is_direct ? reinterpret_cast<T*>(target) : buffers[0];
            compute<T>(op, values[1], values[2], values[3], out, count);
            narrow_values<T>(op.out.dtype, target, op.out.strides[inner], count, out);
        }
    });
}

void run_complex(const DenseRun& run, const HrOp& op) {
    using Complex = std::complex<float>;
    const HrOperand* const operands[3] = {&op.out, &op.a, &op.b};
    const bool is_polar = op.code == HR_OP_POLAR;
    for_each_place(op.sizes, op.num_dims, operands, [&](const int64_t* offsets) {
        Complex& out = run.at<Complex>(op.out)[offsets[0]];
        if (is_polar) {
            const float magnitude = run.at<float>(op.a)[offsets[1]];
            const float angle = run.at<float>(op.b)[offsets[2]];
            out = Complex(magnitude * std::cos(angle), magnitude * std::sin(angle));
            return;
        }
        const Complex a = run.at<Complex>(op.a)[offsets[1]], b = run.at<Complex>(op.b)[offsets[2]];
        out = Complex(a.real() * b.real() - a.imag() * b.imag(),
                      a.real() * b.imag() + a.imag() * b.real());
    });
}

}  // namespace

void run_elementwise(const DenseRun& run, const HrOp& op) {
    if (op.code == HR_OP_POLAR || op.code == HR_OP_COMPLEX_MUL) return run_complex(run, op);
    const HrOperand* const operands[] = {&op.out, &op.a, &op.b, &op.c};
    bool has_whole_numbers = false;
    for (const HrOperand* operand : operands)
        if (operand->dtype == HR_VALUE_INT64) has_whole_numbers = true;
    if (has_whole_numbers)
        run_real<double>(run, op);
    else
        run_real<float>(run, op);
}
