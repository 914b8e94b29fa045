// AVX2 with FMA and F16C: 8 lanes, two vectors for the 16 sums.

#include <immintrin.h>

#include "kernel_template.h"

namespace {

struct Avx2 {
    static constexpr int LANES = 8;
    static constexpr int OUTPUTS = 4;
    static constexpr int ONE_ROW_OUTPUTS = 4;
    static constexpr int AHEAD_BYTES = 512;
    static constexpr int FARTHER_BYTES = 0;
    static constexpr int OUTPUTS_OF_ROWS = 2;
    static constexpr int ROWS = 3;
    using Reg = __m256;

    static Reg zero() { return _mm256_setzero_ps(); }
    static Reg load(const float* source) { return _mm256_loadu_ps(source); }
    static Reg broadcast(float value) { return _mm256_set1_ps(value); }
    static void store(float* target, Reg value) { _mm256_storeu_ps(target, value); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    __attribute__((always_inline)) static void prefetch(const char* address) { _mm_prefetch(address, _MM_HINT_T0); }

    template <int D>
    static Reg widen(const char* source) {
        if constexpr (D == HR_FLOAT32) {
            return _mm256_loadu_ps(reinterpret_cast<const float*>(source));
        } else {
            const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
            if constexpr (D == HR_FLOAT16) return _mm256_cvtph_ps(bits);
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        }
    }

    static float reduce(const Reg (&sums)[2]) {
        const __m256 eight = _mm256_add_ps(sums[0], sums[1]);
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        s = _mm_add_ss(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(s);
    }
};

}  // namespace

extern const Kernels avx2_kernels = kernels_of<Avx2>();
