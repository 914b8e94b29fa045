// AVX512_BF16 for fp8 experts whose rows are bfloat16 (packed.h, PairKernels): every number in e4m3 is
// one in bfloat16, so an instruction multiplies two inputs of 16 outputs with a row's and adds them.
//
// A line has 4 inputs of each output, decoded as the pairs k, k+2 and k+1, k+3; rows lie in that
// order. A few rows are multiplied while weights are decoded. Of more the first ones decode a group
// into the first-level cache, where the others find it. What follows is asked for meanwhile.

#include <immintrin.h>

#include "packed_template.h"

namespace {

constexpr int GROUP_INPUTS = 128, GROUP_LINES = GROUP_INPUTS / 4;
constexpr int SCALE_BYTES = TILE_OUTPUTS * sizeof(float);
constexpr int GROUP_BYTES = SCALE_BYTES + GROUP_LINES * LINE_BYTES;
constexpr int ROWS_AT_ONCE = 8, MOST_ROWS = 64;
// For up to so many rows weights come in four streams, else in two: sums stay in registers.
constexpr int FEW_ROWS = 4, FEW_ROWS_STREAMS = 4;
// How far ahead a few rows' weights are asked for into the first-level cache and into the second one.
// Of more rows a group is asked for while the one before it is multiplied.
constexpr int NEAR_BYTES = 256, FAR_BYTES = 1280;

// How many adjacent tiles each of so many streams goes through. As many as there are, or a few less:
// streams that lie a multiple of a page apart, as with 2048 inputs, read 7 % more slowly, their lines
// sharing few places of the first-level cache.
int tiles_per_stream(int num_tiles, int num_streams, int64_t tile_bytes) {
    constexpr int64_t PAGE_BYTES = 4096, NEAR_BYTES = 256;
    const int most = num_tiles / num_streams;
    for (int count = most; count > 0 && count > most - 4; count--) {
        const int64_t beyond = count * tile_bytes % PAGE_BYTES;
        if (beyond >= NEAR_BYTES && beyond <= PAGE_BYTES - NEAR_BYTES) return count;
    }
    return most;
}

// Words s eeee mmm 0... moved so that they are bfloat16 numbers of 1 / 256 of the value.
inline __m512i decode_words(__m512i words) {
    // s (eeee + 112) mmm 0000: the exponent's upper bits are set, not added.
    const __m512i kept = _mm512_set1_epi16(short(0x87f0));
    const __m512i bias = _mm512_set1_epi16(0x3800);
    return _mm512_ternarylogic_epi32(_mm512_srai_epi16(words, 4), kept, bias, 0xea);
}

// The same where some are subnormal: mmm * 2^-17, which is a normal number here.
inline __m512i decode_subnormal_words(__m512i words) {
    alignas(64) static constexpr uint16_t NUMBERS[32] = {0,      0x3700, 0x3780, 0x37c0,
                                                         0x3800, 0x3820, 0x3840, 0x3860};
    const __mmask32 is_subnormal = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x7800));
    const __m512i fraction =
        _mm512_and_si512(_mm512_srli_epi16(words, 8), _mm512_set1_epi16(7));
    const __m512i number = _mm512_permutexvar_epi16(fraction, _mm512_load_si512(NUMBERS));
    const __m512i sign = _mm512_and_si512(words, _mm512_set1_epi16(short(0x8000)));
    return _mm512_mask_blend_epi16(is_subnormal, decode_words(words),
                                   _mm512_or_si512(number, sign));
}

__attribute__((noinline)) void decode_subnormal_line(__m512i codes, __m512i (&pairs)[2]) {
    pairs[0] = decode_subnormal_words(_mm512_slli_epi16(codes, 8));
    pairs[1] = decode_subnormal_words(codes);
}

// Pairs k, k+2 and k+1, k+3. Subnormal weights are rare enough for lines with some to go apart.
inline void decode_line(const char* at, __m512i (&pairs)[2]) {
    const __m512i codes = _mm512_loadu_si512(at);
    if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0, 0))
        return decode_subnormal_line(codes, pairs);
    pairs[0] = decode_words(_mm512_slli_epi16(codes, 8));
    pairs[1] = decode_words(codes);
}

// A group of T tiles. What is asked for meanwhile, in as many streams, begins at `ask`.
template <int T>
struct Group {
    alignas(64) int32_t decoded[T][2][GROUP_LINES][TILE_OUTPUTS];  // in pairs
    const char* weights;
    int64_t apart_bytes;  // from one tile's to the next one's
    const char* ask;
    int64_t ask_apart_bytes;
};

// Into the second-level cache: the first one holds what is multiplied meanwhile.
__attribute__((always_inline)) inline void ask_for(const char* at) {
    _mm_prefetch(at, _MM_HINT_T1);
}

// Where weights are read: as they are stored and nowhere else, to be decoded for others as well, or
// decoded.
enum Source { STORED, DECODING, DECODED };

// M rows, whose group begins at codes + first; sums [M, T, TILE_OUTPUTS]. Streams ASKED .. ASKED + P
// are asked for.
template <int T, int M, Source SOURCE, int ASKED, int P>
__attribute__((noinline)) void add_rows(Group<T>& group, const PackedRow* rows, int64_t first,
                                        float* sums) {
    const int16_t* x[M];
    each<M>(HR_EACH(m) { x[m] = rows[m].codes + first; });
    __m512 found[T][M];
    each<T * M>(HR_EACH(i) { found[i / M][i % M] = _mm512_setzero_ps(); });
    const char* ask = group.ask + ASKED * group.ask_apart_bytes;
    const char* codes = group.weights + SCALE_BYTES;
    constexpr bool IS_NEAR = T == FEW_ROWS_STREAMS && SOURCE == STORED;
    for (int line = 0; line < GROUP_LINES; line++) {
        each<P>(HR_EACH(i) { ask_for(ask + i * group.ask_apart_bytes + line * LINE_BYTES); });
        __m512i w[T][2];
        each<T>(HR_EACH(t) {
            if constexpr (IS_NEAR)
                _mm_prefetch(codes + t * group.apart_bytes + line * LINE_BYTES + NEAR_BYTES,
                             _MM_HINT_T0);
            if constexpr (SOURCE == DECODED) {
                each<2>(HR_EACH(j) { w[t][j] = _mm512_load_si512(group.decoded[t][j][line]); });
            } else {
                decode_line(codes + t * group.apart_bytes + line * LINE_BYTES, w[t]);
                if constexpr (SOURCE == DECODING)
                    each<2>(HR_EACH(j) { _mm512_store_si512(group.decoded[t][j][line], w[t][j]); });
            }
        });
        each<2 * M>(HR_EACH(i) {
            constexpr int j = i / M, m = i % M;
            int32_t pair;
            memcpy(&pair, x[m] + line * 4 + j * 2, sizeof pair);
            const __m512i values = _mm512_set1_epi32(pair);
            each<T>(HR_EACH(t) {
                found[t][m] = _mm512_dpbf16_ps(found[t][m], (__m512bh)w[t][j], (__m512bh)values);
            });
        });
    }
    // As many lines as the codes of a group have, and its scales.
    each<P>(HR_EACH(i) { ask_for(ask + i * group.ask_apart_bytes + GROUP_LINES * LINE_BYTES); });
    each<T>(HR_EACH(t) {
        const __m512 stored = _mm512_loadu_ps(group.weights + t * group.apart_bytes);
        const __m512 scale = _mm512_mul_ps(stored, _mm512_set1_ps(256.0f));
        each<M>(HR_EACH(m) {
            float* sum = sums + (m * T + t) * TILE_OUTPUTS;
            _mm512_store_ps(sum, _mm512_fmadd_ps(found[t][m], scale, _mm512_load_ps(sum)));
        });
    });
}

template <int T>
using AddRows = void (*)(Group<T>&, const PackedRow*, int64_t, float*);

template <int T, Source SOURCE, int ASKED, int P>
AddRows<T> adder_for(int num_rows) {
    constexpr int MOST = T == FEW_ROWS_STREAMS ? FEW_ROWS : ROWS_AT_ONCE;
    static constexpr AddRows<T> ADDERS[ROWS_AT_ONCE] = {
        add_rows<T, 1, SOURCE, ASKED, P>,
        add_rows<T, 2, SOURCE, ASKED, P>,
        add_rows<T, 3, SOURCE, ASKED, P>,
        add_rows<T, 4, SOURCE, ASKED, P>,
        add_rows<T, MOST < 5 ? 1 : 5, SOURCE, ASKED, P>,
        add_rows<T, MOST < 6 ? 1 : 6, SOURCE, ASKED, P>,
        add_rows<T, MOST < 7 ? 1 : 7, SOURCE, ASKED, P>,
        add_rows<T, MOST < 8 ? 1 : 8, SOURCE, ASKED, P>,
    };
    return ADDERS[num_rows - 1];
}

// One group of T tiles for all rows.
template <int T>
void add_group(const PackedProduct& p, Group<T>& group, int64_t first, float* sums) {
    if (T > 2 || p.num_rows <= ROWS_AT_ONCE)
        return adder_for<T, STORED, 0, T>(p.num_rows)(group, p.rows, first, sums);
    if constexpr (T <= 2) {
        const int num_blocks = (p.num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
        for (int block = 0, row = 0, size; block < num_blocks; block++, row += size) {
            size = (p.num_rows - row) / (num_blocks - block);
            const auto add = block == 0   ? adder_for<T, DECODING, 0, 1>(size)
                             : block < T ? adder_for<T, DECODED, T - 1, 1>(size)
                                          : adder_for<T, DECODED, 0, 0>(size);
            add(group, p.rows + row, first, sums + row * T * TILE_OUTPUTS);
        }
    }
}

// T streams from tile `first` on, each through `count` adjacent tiles.
template <int T>
void multiply_streams(const PackedProduct& p, int first, int count) {
    Group<T> group;
    alignas(64) float sums[MOST_ROWS * T * TILE_OUTPUTS];
    group.apart_bytes = count * p.tile_bytes;
    for (int tile = first; tile < first + count; tile++) {
        memset(sums, 0, size_t(p.num_rows) * T * TILE_OUTPUTS * sizeof(float));
        group.weights = p.tiles + tile * p.tile_bytes;
        for (int number = 0; number < p.num_groups; number++, group.weights += GROUP_BYTES) {
            group.ask = group.weights + (T == FEW_ROWS_STREAMS ? FAR_BYTES : GROUP_BYTES);
            group.ask_apart_bytes = group.apart_bytes;
            if (tile + 1 == first + count && number + 1 == p.num_groups && p.next.begin) {
                group.ask = p.next.begin;
                group.ask_apart_bytes =
                    tiles_per_stream(p.next.count, T, p.next.tile_bytes) * p.next.tile_bytes;
            }
            add_group<T>(p, group, number * GROUP_INPUTS, sums);
        }
        for (int m = 0; m < p.num_rows; m++)
            for (int t = 0; t < T; t++)
                _mm512_storeu_ps(p.out + m * p.out_stride + (tile + t * count) * TILE_OUTPUTS,
                                 _mm512_load_ps(sums + (m * T + t) * TILE_OUTPUTS));
    }
}

template <int T>
void multiply_tiles(const PackedProduct& p) {
    const int count = tiles_per_stream(p.num_tiles, T, p.tile_bytes);
    multiply_streams<T>(p, 0, count);
    const int count_left = (p.num_tiles - count * T) / T, done = (count + count_left) * T;
    multiply_streams<T>(p, count * T, count_left);
    multiply_streams<1>(p, done, p.num_tiles - done);
}

void multiply(const PackedProduct& product) {
    in_passes(product, MOST_ROWS, [](const PackedProduct& p) {
        if (p.num_rows <= FEW_ROWS)
            multiply_tiles<FEW_ROWS_STREAMS>(p);
        else
            multiply_tiles<2>(p);
    });
}

void lay(const float* values, int64_t count, int16_t* to) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int64_t i = 0; i < count; i += TILE_OUTPUTS) {
        const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(values + i));
        const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_shuffle_epi8(words, order));
    }
}

}  // namespace

extern const PairKernels avx512_pairs = {lay, multiply};
