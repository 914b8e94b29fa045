// AVX-512 with BW and VL alone (Skylake and Cascade Lake servers): products of words.

#include "packed_avx512.h"

namespace {

struct Avx512Words : Avx512Lines {
    static constexpr bool HAS_BYTE_PRODUCTS = false;
    static constexpr int ROWS = 4;

    static Words even(__m512i bytes) { return _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8); }
    static Words odd(__m512i bytes) { return _mm512_srai_epi16(bytes, 8); }
    static void decode4(const char* at, const Table& table, Words (&w)[4]) {
        const __m512i codes = line(at), mask = _mm512_set1_epi8(15);
        const __m512i first = _mm512_shuffle_epi8(table, _mm512_and_si512(codes, mask));
        const __m512i second =
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask));
        w[0] = even(first);
        w[1] = even(second);
        w[2] = odd(first);
        w[3] = odd(second);
    }
    static void decode8(const char* at, Words (&w)[2]) {
        const __m512i codes = line(at);
        w[0] = even(codes);
        w[1] = odd(codes);
    }
    // Words s eeee mmm 0.. moved so that they are float16 numbers of 1 / 256 of the value.
    static void widen_pairs(__m512i words, Float& low, Float& high) {
        const __m512i halves =
            _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(short(0xbf80)));
        low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
        high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(halves, 16)));
    }
    static void decode_fp8(const char* at, Float (&w)[4]) {
        const __m512i codes = line(at);
        widen_pairs(_mm512_slli_epi16(codes, 8), w[0], w[2]);
        widen_pairs(codes, w[1], w[3]);
    }
    static Int dot(Int sum, Words w, const int16_t* pair) {
        int32_t both;
        memcpy(&both, pair, sizeof both);
        return _mm512_add_epi32(sum, _mm512_madd_epi16(w, _mm512_set1_epi32(both)));
    }
};

}  // namespace

extern const PackedKernels avx512_words_packed = packed_of<Avx512Words>();
