// AVX2 with FMA and F16C: a line is two registers.

#include <immintrin.h>

#include "packed_template.h"

namespace {

struct Avx2 {
    static constexpr int LANES = 8;
    static constexpr bool HAS_BYTE_PRODUCTS = false;
    static constexpr bool KNOWS_SIZES = false;
    static constexpr int TILES = 1;
    static constexpr int FLOAT_TILES = 1;
    static constexpr int ROWS = 2;
    static constexpr int FLOAT_ROWS = 1;
    using Int = __m256i;
    using Words = __m256i;
    using Float = __m256;
    using Table = __m256i;

    static Int zero_int() { return _mm256_setzero_si256(); }
    static Float zero_float() { return _mm256_setzero_ps(); }
    static __m256i line(const char* at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    }
    __attribute__((always_inline)) static void prefetch(const char* address) { _mm_prefetch(address, _MM_HINT_T0); }

    static Table table(const int8_t* values) {
        return _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    }
    static Words even(__m256i bytes) {
        return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    }
    static Words odd(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }
    static void decode4(const char* at, const Table& table, Words (&w)[4]) {
        const __m256i codes = line(at), mask = _mm256_set1_epi8(15);
        const __m256i first = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, mask));
        const __m256i second =
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask));
        w[0] = even(first);
        w[1] = even(second);
        w[2] = odd(first);
        w[3] = odd(second);
    }
    static void decode8(const char* at, Words (&w)[2]) {
        const __m256i codes = line(at);
        w[0] = even(codes);
        w[1] = odd(codes);
    }
    // Words s eeee mmm 0.. moved so that they are float16 numbers of 1 / 256 of the value.
    static void widen_pairs(__m256i words, Float& low, Float& high) {
        const __m256i halves =
            _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(short(0xbf80)));
        const __m256i packed =
            _mm256_packus_epi32(_mm256_and_si256(halves, _mm256_set1_epi32(0xffff)),
                                _mm256_srli_epi32(halves, 16));
        const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
        low = _mm256_cvtph_ps(_mm256_castsi256_si128(ordered));
        high = _mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1));
    }
    static void decode_fp8(const char* at, Float (&w)[4]) {
        const __m256i codes = line(at);
        widen_pairs(_mm256_slli_epi16(codes, 8), w[0], w[2]);
        widen_pairs(codes, w[1], w[3]);
    }
    static Int dot(Int sum, Words w, const int16_t* pair) {
        int32_t both;
        memcpy(&both, pair, sizeof both);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(w, _mm256_set1_epi32(both)));
    }
    static Int minus(Int sum, const char* zeros, int32_t count) {
        const __m256i zero =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros)));
        return _mm256_sub_epi32(sum, _mm256_mullo_epi32(zero, _mm256_set1_epi32(count)));
    }
    static Float to_float(Int value) { return _mm256_cvtepi32_ps(value); }
    static Float load(const char* from) {
        return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    }
    static Float scale(int kind, const char* from) {
        switch (kind) {
            case HR_SCALE_FLOAT32: return load(from);
            case HR_SCALE_FLOAT16:
                return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            case HR_SCALE_BFLOAT16:
                return _mm256_castsi256_ps(_mm256_slli_epi32(
                    _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                    16));
            case HR_SCALE_E8M0:
                return _mm256_castsi256_ps(_mm256_slli_epi32(
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))),
                    23));
            default: {
                const __m128i words = _mm_slli_epi16(
                    _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 8);
                const __m128i halves =
                    _mm_and_si128(_mm_srai_epi16(words, 1), _mm_set1_epi16(short(0xbf80)));
                return _mm256_cvtph_ps(halves);
            }
        }
    }
    static Float multiply(Float a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
    static Float multiply(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float fma(Float a, float b, Float c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
    static void store(float* to, Float value) { _mm256_storeu_ps(to, value); }
};

}  // namespace

extern const PackedKernels avx2_packed = packed_of<Avx2>();
