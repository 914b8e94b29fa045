// AVX-512 (foundation): 16 lanes, one vector for the 16 sums.
//
// The bf16 dot product instructions are not used here: they flush subnormal values and round otherwise
// than a fused multiply-add (laid_avx512.cpp has them, for experts).

#include <immintrin.h>

#include "kernel_template.h"

#include "dot_stretches.h"

namespace {

struct Avx512 {
    static constexpr int LANES = 16;
    static constexpr int OUTPUTS = 8;
    static constexpr int ONE_ROW_OUTPUTS = 8;
    static constexpr int AHEAD_BYTES = 512;
    static constexpr int FARTHER_BYTES = 0;
    static constexpr int OUTPUTS_OF_ROWS = 4;
    static constexpr int ROWS = 4;
    using Reg = __m512;

    static Reg zero() { return _mm512_setzero_ps(); }
    static Reg load(const float* source) { return _mm512_loadu_ps(source); }
    static Reg broadcast(float value) { return _mm512_set1_ps(value); }
    static void store(float* target, Reg value) { _mm512_storeu_ps(target, value); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    __attribute__((always_inline)) static void prefetch(const char* address) { _mm_prefetch(address, _MM_HINT_T0); }

    // In a register: a compiler may read it from memory for every product instead.
    __attribute__((always_inline)) static void keep(Reg& value) { asm("" : "+v"(value)); }

    // Into the second-level cache: what is needed later than the first one can keep.
    __attribute__((always_inline)) static void ask_for(const char* address) { _mm_prefetch(address, _MM_HINT_T1); }

    template <int D>
    static Reg widen(const char* source) {
        if constexpr (D == HR_FLOAT32) {
            return _mm512_loadu_ps(source);
        } else {
            const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
            if constexpr (D == HR_FLOAT16) return _mm512_cvtph_ps(bits);
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
        }
    }

    static float reduce(const Reg (&sums)[1]) {
        const __m256 low = _mm512_castps512_ps256(sums[0]);
        const __m256 high =
            _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums[0]), 1));
        const __m256 eight = _mm256_add_ps(low, high);
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        s = _mm_add_ss(s, _mm_movehdup_ps(s));
        return _mm_cvtss_f32(s);
    }
};

// Zen 4 reads memory fastest in few streams, each asked for little ahead, and farther into the
// second-level cache.
struct Avx512Amd : Avx512 {
    static constexpr int ONE_ROW_OUTPUTS = 4;
    static constexpr int AHEAD_BYTES = 256;
    static constexpr int FARTHER_BYTES = 1024;
};

// `V`: for one row and two.
template <class V, int D>
void dot_any_rows(const Product& p) {
    if (p.num_rows >= LEAST_MANY_ROWS<D>)
        dot_many_rows<Avx512, D>(p);
    else if (p.num_rows >= LEAST_FEW_ROWS && p.num_rows <= BLOCK_ROWS<4>)
        dot_few_rows<Avx512, D, 4>(p);
    else if (p.num_rows >= LEAST_FEW_ROWS && p.num_rows <= BLOCK_ROWS<3>)
        dot_few_rows<Avx512, D, 3>(p);
    else
        dot_rows<V, D>(p);
}

template <class V>
constexpr Kernels kernels_with() {
    return {{dot_any_rows<V, HR_FLOAT32>, dot_any_rows<V, HR_BFLOAT16>, dot_any_rows<V, HR_FLOAT16>},
            {sum_columns<Avx512, HR_FLOAT32>, sum_columns<Avx512, HR_BFLOAT16>,
             sum_columns<Avx512, HR_FLOAT16>}};
}

}  // namespace

extern const Kernels avx512_kernels = kernels_with<Avx512>();
extern const Kernels avx512_amd_kernels = kernels_with<Avx512Amd>();
