// exp as every processor rounds it alike, for activations, softmax and gates.
#pragma once

#include "number_formats.h"

namespace {

// exp, within two units in the last place, in operations that every processor rounds alike and that
// loops do several of at once. Beyond -87 .. 88 it stays at the ends; no number stays none.
inline float exponential(float x) {
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shifted = x * 1.44269504088896341f + ROUNDING;
    const float power = shifted - ROUNDING;
    // x - power * ln 2, in two parts, the first of which multiplies exactly
    const float rest = (x - power * 0.693359375f) - power * -2.12194440e-4f;
    // 1 + rest + rest^2 * polynomial(rest), after Cephes' expf
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    return sum * float_of_bits((bits_of_float(shifted) - bits_of_float(ROUNDING) + 127) << 23);
}

}  // namespace
