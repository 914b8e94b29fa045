// What the 16 partial sums of an output come to, with AVX-512: the order that kernels.h states.
#pragma once

#include <immintrin.h>

namespace {

// Four outputs at once: halves of two vectors share one addition, quarters of four another.
inline __m128 add_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44),
                                    _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44),
                                    _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                             _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, s));
}

// Those of N outputs or rows, number i to out[i * apart].
template <int N>
__attribute__((always_inline)) inline void store_lane_sums(const __m512 (&sums)[N], float* out,
                                                           int64_t apart) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i += 4) {
        const auto sum = [&sums, i](int j) { return sums[i + j < N ? i + j : i]; };
        const __m128 found = add_lanes(sum(0), sum(1), sum(2), sum(3));
        if (apart == 1 && i + 4 <= N) {
            _mm_storeu_ps(out + i, found);
            continue;
        }
        alignas(16) float four[4];
        _mm_store_ps(four, found);
        for (int j = 0; j < 4 && i + j < N; j++) out[(i + j) * apart] = four[j];
    }
}

}  // namespace
