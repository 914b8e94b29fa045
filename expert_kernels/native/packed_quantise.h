// A row's values as the integers of packed.h, for each instruction set by its compiler; in an unnamed
// namespace for the reason that kernel_template.h gives.
#pragma once

#include <cstdint>
#include <cstring>

#include "packed.h"

namespace {

// Element by element, so the compiler's vectors have the same bits. A group with a value that is
// infinite or no number gets the scale NaN.
template <bool IN_BYTES>
void quantise_packed(const float* values, int64_t num_groups, int32_t group_size,
                     int16_t* codes, float* scales, int32_t* sums) {
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest, ties to even
    constexpr int32_t ROUNDING_BITS = 0x4b400000;
    for (int64_t group = 0; group < num_groups; group++) {
        const float* x = values + group * group_size;
        int16_t* out = codes + group * group_size;
        int32_t greatest = 0;  // magnitudes compare as their bits do
        for (int i = 0; i < group_size; i++) {
            int32_t bits;
            memcpy(&bits, x + i, sizeof bits);
            bits &= 0x7fffffff;
            greatest = bits > greatest ? bits : greatest;
        }
        float magnitude;
        memcpy(&magnitude, &greatest, sizeof magnitude);
        const bool is_finite = greatest < 0x7f800000;
        if (!is_finite || magnitude < LEAST_MAGNITUDE) {
            memset(out, 0, size_t(group_size) * sizeof(int16_t));
            sums[group] = 0;
            scales[group] = is_finite ? 0.0f : __builtin_nanf("");
            continue;
        }
        scales[group] = magnitude / float(MAX_CODE);
        const float inverse = float(MAX_CODE) / magnitude;
        int32_t sum = 0;
        int32_t found[128];
        for (int i = 0; i < group_size; i++) {
            const float rounded = x[i] * inverse + ROUNDING;
            int32_t code;
            memcpy(&code, &rounded, sizeof code);
            code -= ROUNDING_BITS;
            code = code > MAX_CODE ? MAX_CODE : code < -MAX_CODE ? -MAX_CODE : code;
            found[i] = code;
            sum += code;
        }
        sums[group] = sum;
        if constexpr (IN_BYTES) {
            int8_t* bytes = reinterpret_cast<int8_t*>(out);
            for (int i = 0; i < group_size; i++) {
                bytes[i] = int8_t((found[i] + 128) >> 8);
                bytes[group_size + i] = int8_t(found[i]);
            }
            continue;
        }
        for (int i = 0; i < group_size; i += 4) {
            out[i] = int16_t(found[i]);
            out[i + 1] = int16_t(found[i + 2]);
            out[i + 2] = int16_t(found[i + 1]);
            out[i + 3] = int16_t(found[i + 3]);
        }
    }
}

}  // namespace
