// What the AVX-512 kernels for packed weights share: a line is one register.
#pragma once

#include <immintrin.h>

#include "packed_template.h"

namespace {

struct Avx512Lines {
    static constexpr int LANES = 16;
    static constexpr bool KNOWS_SIZES = true;
    static constexpr int TILES = 8;
    static constexpr int FLOAT_TILES = 4;
    static constexpr int FLOAT_ROWS = 4;
    using Int = __m512i;
    using Words = __m512i;
    using Float = __m512;
    using Table = __m512i;

    static Int zero_int() { return _mm512_setzero_si512(); }
    static Float zero_float() { return _mm512_setzero_ps(); }
    static __m512i line(const char* at) { return _mm512_loadu_si512(at); }
    __attribute__((always_inline)) static void prefetch(const char* address) { _mm_prefetch(address, _MM_HINT_T0); }

    static Table table(const int8_t* values) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    }
    static Int minus(Int sum, const char* zeros, int32_t count) {
        const __m512i zero =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
        return _mm512_sub_epi32(sum, _mm512_mullo_epi32(zero, _mm512_set1_epi32(count)));
    }
    static Float to_float(Int value) { return _mm512_cvtepi32_ps(value); }
    static Float load(const char* from) { return _mm512_loadu_ps(from); }
    static Float scale(int kind, const char* from) {
        switch (kind) {
            case HR_SCALE_FLOAT32: return load(from);
            case HR_SCALE_FLOAT16:
                return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
            case HR_SCALE_BFLOAT16:
                return _mm512_castsi512_ps(_mm512_slli_epi32(
                    _mm512_cvtepu16_epi32(
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
                    16));
            case HR_SCALE_E8M0:
                return _mm512_castsi512_ps(_mm512_slli_epi32(
                    _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                    23));
            default: {
                const __m256i words = _mm256_slli_epi16(
                    _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                    8);
                const __m256i halves =
                    _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(short(0xbf80)));
                return _mm512_cvtph_ps(halves);
            }
        }
    }
    static Float multiply(Float a, float b) { return _mm512_mul_ps(a, _mm512_set1_ps(b)); }
    static Float multiply(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float fma(Float a, float b, Float c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
    static void store(float* to, Float value) { _mm512_storeu_ps(to, value); }
};

}  // namespace
