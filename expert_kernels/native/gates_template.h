// Activations and gates, written once and compiled once per instruction set. Contraction of
// a * b + c is off and every operation is one that all processors round alike, so results do not
// depend on the set; only how many elements are done at once does.
//
// Everything is in an unnamed namespace and uses no inline function of the standard library, for
// the reason that kernel_template.h gives.
//
// Sources of the formulas: torch's functional documentation and transformers' ACT2FN; where the
// latter composes several torch operations, each of them rounds to the dtype (R below).
#pragma once

#include <math.h>

#include "exponential.h"
#include "gates.h"
#include "number_formats.h"

namespace {

template <int D>
float rounded(float value) {
    if constexpr (D == HR_BFLOAT16) return round_to_bfloat16(value);
    if constexpr (D == HR_FLOAT16) return round_to_float16(value);
    return value;
}

template <int D>
float item(const char* data, int64_t index) {
    if constexpr (D == HR_FLOAT32) {
        float value;
        memcpy(&value, data + index * 4, sizeof value);
        return value;
    } else {
        uint16_t bits;
        memcpy(&bits, data + index * 2, sizeof bits);
        return D == HR_BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
    }
}

// Comparisons with a value that is not a number are false, so these let it through, as torch does.
float at_most(float value, float high) { return value > high ? high : value; }
float within(float value, float low, float high) {
    return value < low ? low : at_most(value, high);
}

float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
float gelu(float x) { return x * 0.5f * (1.0f + erff(x * 0.70710678118654752440f)); }

constexpr float SQRT_2_OVER_PI = 0.79788456080286535588f;

float gelu_tanh(float x) {
    const float inner = SQRT_2_OVER_PI * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
}

template <int D>
float gelu_accurate(float x) {
    constexpr auto R = rounded<D>;
    const float cube = R(x * x * x);
    const float inner = R(SQRT_2_OVER_PI * R(x + R(0.044715f * cube)));
    return R(R(0.5f * x) * R(1.0f + R(tanhf(inner))));
}

template <int D>
float gelu_fast(float x) {
    constexpr auto R = rounded<D>;
    const float slope = R(1.0f + R(R(0.044715f * x) * x));
    const float inner = R(R(x * 0.7978845608f) * slope);
    return R(R(0.5f * x) * R(1.0f + R(tanhf(inner))));
}

template <int D>
float silu(float x) {
    return rounded<D>(x / (1.0f + exponential(-x)));
}

template <int D>
float activate(int32_t activation, float x) {
    constexpr auto R = rounded<D>;
    switch (activation) {
        case HR_GELU: return R(gelu(x));
        case HR_GELU_10: return within(R(gelu(x)), -10.0f, 10.0f);
        case HR_GELU_ACCURATE: return gelu_accurate<D>(x);
        case HR_GELU_FAST: return gelu_fast<D>(x);
        case HR_GELU_PYTORCH_TANH: return R(gelu_tanh(x));
        case HR_HARDSWISH: return R(x * within(x + 3.0f, 0.0f, 6.0f) / 6.0f);
        case HR_LEAKY_RELU: return x > 0.0f ? x : R(x * 0.01f);
        case HR_LINEAR: return x;
        case HR_MISH: return R(x * tanhf(softplus(x)));
        case HR_QUICK_GELU: return R(x * R(sigmoid(R(1.702f * x))));
        case HR_RELU: return x < 0.0f ? 0.0f : x;
        case HR_RELU2: return x < 0.0f ? 0.0f : R(x * x);
        case HR_RELU6: return within(x, 0.0f, 6.0f);
        case HR_SIGMOID: return R(sigmoid(x));
        case HR_SILU: return silu<D>(x);
        case HR_SQRT_SOFTPLUS: return R(sqrtf(R(softplus(x))));
        default: return R(tanhf(x));
    }
}

template <int D>
float project(const HrForm& form, float sum, const char* bias, int64_t index) {
    if (!bias) return rounded<D>(sum);
    const float start = form.is_transposed ? rounded<D>(sum) : sum;
    return rounded<D>(start + item<D>(bias, index));
}

// Loops over a few units with one operation each, which become vectors for float32 and bfloat16.
constexpr int CHUNK = 64;

template <int D>
void activate_all(int32_t activation, float* x, int32_t count) {
    if (activation == HR_SILU)
        for (int32_t i = 0; i < count; i++) x[i] = silu<D>(x[i]);
    else
        for (int32_t i = 0; i < count; i++) x[i] = activate<D>(activation, x[i]);
}

template <int D>
void combine(const HrForm& form, float* gate, float* up, int32_t count) {
    constexpr auto R = rounded<D>;
    if (form.gate != HR_ACT_MUL) {
        const float high = R(form.limit), low = R(-form.limit);
        for (int32_t i = 0; i < count; i++) gate[i] = at_most(gate[i], high);
        for (int32_t i = 0; i < count; i++) up[i] = within(up[i], low, high);
    }
    if (form.gate != HR_ALPHA_SWIGLU) {
        activate_all<D>(form.activation, gate, count);
        for (int32_t i = 0; i < count; i++) gate[i] = R(gate[i] * up[i]);
        return;
    }
    const float alpha = form.alpha;
    for (int32_t i = 0; i < count; i++) {
        const float glu = R(gate[i] * R(sigmoid(R(gate[i] * alpha))));
        gate[i] = R(R(up[i] + 1.0f) * glu);
    }
}

// The sums at `sums`, `step` apart, with their biases, if any.
template <int D>
void project_all(const HrForm& form, const float* sums, const char* bias, int64_t bias_begin,
                 int64_t step, float* out, int32_t count) {
    if (!bias && step == 1)
        for (int32_t i = 0; i < count; i++) out[i] = rounded<D>(sums[i]);
    else
        for (int32_t i = 0; i < count; i++)
            out[i] = project<D>(form, sums[i * step], bias, bias_begin + i * step);
}

template <int D>
void gate_row(const HrForm& form, const GateRow& row) {
    for (int32_t begin = 0; begin < row.count; begin += CHUNK) {
        const int32_t left = row.count - begin, count = left < CHUNK ? left : CHUNK;
        const int64_t at = begin * row.step;
        float* out = row.out + begin;
        project_all<D>(form, row.sums + at, row.bias, at, row.step, out, count);
        if (!form.has_gate) {
            activate_all<D>(form.activation, out, count);
            continue;
        }
        float up[CHUNK];
        project_all<D>(form, row.sums + row.up_begin + at, row.bias, row.bias_up_begin + at,
                       row.step, up, count);
        combine<D>(form, out, up, count);
    }
}

template <int D>
void finish(const HrForm& form, const float* sums, const char* bias, float* out, int64_t count) {
    project_all<D>(form, sums, bias, 0, 1, out, int32_t(count));
}

template <int D>
void widen(const char* source, float* target, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = item<D>(source, i);
}

void apply_gate(const HrForm& form, const GateRow& row) {
    if (form.dtype == HR_FLOAT32) return gate_row<HR_FLOAT32>(form, row);
    if (form.dtype == HR_BFLOAT16) return gate_row<HR_BFLOAT16>(form, row);
    gate_row<HR_FLOAT16>(form, row);
}

void finish_row(const HrForm& form, const float* sums, const char* bias, float* out,
                int64_t count) {
    if (form.dtype == HR_FLOAT32) return finish<HR_FLOAT32>(form, sums, bias, out, count);
    if (form.dtype == HR_BFLOAT16) return finish<HR_BFLOAT16>(form, sums, bias, out, count);
    finish<HR_FLOAT16>(form, sums, bias, out, count);
}

void widen_row(int32_t dtype, const char* source, float* target, int64_t count) {
    if (dtype == HR_FLOAT32) return widen<HR_FLOAT32>(source, target, count);
    if (dtype == HR_BFLOAT16) return widen<HR_BFLOAT16>(source, target, count);
    widen<HR_FLOAT16>(source, target, count);
}

constexpr Gates gates_of() { return {apply_gate, finish_row, widen_row}; }

}  // namespace
