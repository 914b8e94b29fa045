// From the first projection's sums to the second projection's inputs, element by element.
#pragma once

#include <cstdint>

#include "experts.h"

// Sums of one row for `count` units of the intermediate size: gate of unit i at
// sums[i * step], up at sums[up_begin + i * step] (unused without a gate). Biases likewise, in the
// form's dtype, or null. Results go to out[0 .. count).
struct GateRow {
    const float* sums;
    int64_t up_begin;
    int64_t step;
    const char* bias;
    int64_t bias_up_begin;
    float* out;
    int32_t count;
};

struct Gates {
    // Rounds where torch's own operations round to the form's dtype: after the product (and, for
    // transposed weights, whose bias is added apart, after the bias again) and after every
    // operation of the gate.
    void (*apply_gate)(const HrForm& form, const GateRow& row);
    // A row of the second projection: sums and bias to the result, rounded to the dtype, as
    // float32.
    void (*finish_row)(const HrForm& form, const float* sums, const char* bias, float* out,
                       int64_t count);
    // `count` values of the form's dtype to float32.
    void (*widen_row)(int32_t dtype, const char* source, float* target, int64_t count);
};

// Whether these give the scalar ones' bits on this machine (self_check.cpp).
bool has_scalar_bits(const Gates& gates);

extern const Gates scalar_gates;
#if defined(HR_HAS_X86)
extern const Gates avx2_gates;
extern const Gates avx512_gates;
#endif

int64_t item_bytes(int32_t dtype);
