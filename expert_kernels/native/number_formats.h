// bfloat16 and float16 as 16 bits, to and from float32; to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of_bfloat16(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

inline float float_of_float16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 0x1f;
    const uint32_t fraction = half & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact
        const float magnitude = float(fraction) * 5.9604644775390625e-8f;
        return float_of_bits(bits_of_float(magnitude) | sign);
    }
    const uint32_t wide = exponent == 0x1f ? 0xff : exponent + 112;
    return float_of_bits(sign | wide << 23 | fraction << 13);
}

// The nearest bfloat16, as float32. Without a branch, so that loops of it become vectors.
inline float round_to_bfloat16(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
    const bool is_number = int32_t(bits & 0x7fffffff) <= 0x7f800000;
    return float_of_bits(is_number ? nearest : bits | 0x400000);
}

// The nearest float16, as float32.
inline float round_to_float16(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = bits & 0x80000000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000) return value;  // infinite or not a number
    if (magnitude < 0x38800000) {               // below 2^-14: a multiple of 2^-24
        // Adding 0.5 leaves a unit in the last place of exactly 2^-24, rounded as wanted.
        const float sum = float_of_bits(magnitude) + 0.5f;
        return float_of_bits(bits_of_float(sum - 0.5f) | sign);
    }
    magnitude = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & 0xffffe000;
    if (magnitude >= 0x47800000) magnitude = 0x7f800000;  // from 65520 on: infinite
    return float_of_bits(sign | magnitude);
}

// The bits of the nearest float16.
inline uint16_t bits_of_float16(float value) {
    const uint32_t bits = bits_of_float(round_to_float16(value));
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude == 0x7f800000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000)  // a multiple of 2^-24
        return uint16_t(sign | uint32_t(float_of_bits(magnitude) * 16777216.0f));
    return uint16_t(sign | (magnitude - 0x38000000) >> 13);
}

}  // namespace
