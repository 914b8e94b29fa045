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
    __attribute__((always_inline)) static void prefetch_far(const char* address) { _mm_prefetch(address, _MM_HINT_T1); }

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
                // s eeee mmm to s 0 eeee mmm 0...: what is 256 times too small in float16.
                const __m256i words = _mm256_slli_epi16(
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                    7);
                const __m256i halves =
                    _mm256_and_si256(words, _mm256_set1_epi16(short(0xbf80)));
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

// As quantise_packed<true>, with the same operations on each value: groups are too short for what a
// compiler makes of its loops.
inline void quantise_avx512(const float* values, int64_t num_groups, int32_t group_size,
                            int16_t* codes, float* scales, int32_t* sums) {
    const __m512 rounding = _mm512_set1_ps(12582912.0f);
    const __m512i most = _mm512_set1_epi32(MAX_CODE), least = _mm512_set1_epi32(-MAX_CODE);
    for (int64_t group = 0; group < num_groups; group++) {
        const float* x = values + group * group_size;
        int8_t* out = reinterpret_cast<int8_t*>(codes + group * group_size);
        __m512i all = _mm512_setzero_si512();
        for (int i = 0; i < group_size; i += 16) {
            const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(x + i));
            all = _mm512_max_epi32(all, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
        }
        const int32_t greatest = _mm512_reduce_max_epi32(all);
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
        const __m512 inverse = _mm512_set1_ps(float(MAX_CODE) / magnitude);
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < group_size; i += 16) {
            const __m512 rounded =
                _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse), rounding);
            __m512i code =
                _mm512_sub_epi32(_mm512_castps_si512(rounded), _mm512_castps_si512(rounding));
            code = _mm512_max_epi32(_mm512_min_epi32(code, most), least);
            sum = _mm512_add_epi32(sum, code);
            const __m512i upper =
                _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + group_size + i),
                             _mm512_cvtepi32_epi8(code));
        }
        sums[group] = _mm512_reduce_add_epi32(sum);
    }
}

}  // namespace
