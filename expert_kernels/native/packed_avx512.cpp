// AVX-512 with BW, VL, VNNI and VBMI: a line is one register.

#include "packed_avx512.h"

namespace {

struct Avx512 : Avx512Lines {
    static constexpr bool HAS_BYTE_PRODUCTS = true;
    static constexpr int ROWS = 8;

    // A lookup takes the lower six bits of an index, of which the table ignores the upper two.
    template <bool IS_LOOKED_UP>
    static void decode4(const char* at, const Table& table, Words (&w)[2]) {
        const __m512i codes = line(at), high = _mm512_srli_epi16(codes, 4);
        if constexpr (IS_LOOKED_UP) {
            w[0] = _mm512_permutexvar_epi8(codes, table);
            w[1] = _mm512_permutexvar_epi8(high, table);
        } else {
            w[0] = _mm512_and_si512(codes, _mm512_set1_epi8(15));
            w[1] = _mm512_and_si512(high, _mm512_set1_epi8(15));
        }
    }
    static void decode8(const char* at, Words (&w)[1]) {
        w[0] = _mm512_xor_si512(line(at), _mm512_set1_epi8(char(0x80)));
    }
    // The upper two bytes of the float32 of each magnitude / 256, by table of the lower seven bits.
    struct Fp8Tables {
        alignas(64) uint8_t low[128];
        alignas(64) uint8_t high[128];
    };
    static constexpr Fp8Tables make_fp8_tables() {
        Fp8Tables tables{};
        for (int code = 1; code < 128; code++) {
            int exponent = code >> 3, fraction = code & 7;
            if (exponent == 0) {
                exponent = 1;
                while (fraction < 8) {
                    fraction <<= 1;
                    exponent--;
                }
                fraction &= 7;
            }
            const int bits = (exponent + 112) << 7 | fraction << 4;
            tables.low[code] = uint8_t(bits & 255);
            tables.high[code] = uint8_t(bits >> 8);
        }
        return tables;
    }
    // Words (k, k + 2) and (k + 1, k + 3), each the upper half of a float32.
    static void split(__m512i even, __m512i odd, Float (&w)[4]) {
        const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
        w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(even, 16));
        w[1] = _mm512_castsi512_ps(_mm512_slli_epi32(odd, 16));
        w[2] = _mm512_castsi512_ps(_mm512_and_si512(even, upper));
        w[3] = _mm512_castsi512_ps(_mm512_and_si512(odd, upper));
    }
    // Subnormal weights are rare enough for lines with some to be decoded apart, by table.
    static void decode_fp8(const char* at, Float (&w)[4]) {
        const __m512i codes = line(at);
        if (__builtin_expect(_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78)) != 0, 0))
            return decode_subnormal_fp8(codes, w);
        // s eeee mmm to s (eeee + 112) mmm 0000: the exponent's upper bits are set, not added.
        const __m512i kept = _mm512_set1_epi16(short(0x87f0));
        const __m512i bias = _mm512_set1_epi16(0x3800);
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 4);
        const __m512i odd = _mm512_srai_epi16(codes, 4);
        split(_mm512_ternarylogic_epi32(even, kept, bias, 0xea),  // even & kept | bias
              _mm512_ternarylogic_epi32(odd, kept, bias, 0xea), w);
    }
    __attribute__((noinline)) static void decode_subnormal_fp8(__m512i codes, Float (&w)[4]) {
        static constexpr Fp8Tables TABLES = make_fp8_tables();
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.low), codes,
                                                     _mm512_load_si512(TABLES.low + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(TABLES.high), codes,
                                                _mm512_load_si512(TABLES.high + 64));
        // high | codes & 0x80
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
        // Words (k, k + 2) and (k + 1, k + 3), each a float32's upper half.
        const __m512i mask = _mm512_set1_epi16(0xff);
        // mask ? low : high moved to its place
        const __m512i even =
            _mm512_ternarylogic_epi32(mask, low, _mm512_slli_epi16(high, 8), 0xca);
        const __m512i odd =
            _mm512_ternarylogic_epi32(mask, _mm512_srli_epi16(low, 8), high, 0xca);
        split(even, odd, w);
    }
    static Int dot(Int sum, Words w, const int8_t* quad) {
        int32_t four;
        memcpy(&four, quad, sizeof four);
        return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
    }
    static Int combine(Int upper, Int lower) {
        return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower);
    }
    template <int BITS>
    static Int less(Int sum, int32_t count) {
        return _mm512_sub_epi32(sum, _mm512_slli_epi32(_mm512_set1_epi32(count), BITS));
    }
};

// fp8 for many rows: a group of two tiles is decoded once for all of them, into memory that stays in
// the first-level cache. Every row's sums are made as by the other way, in the same order: first
// those of inputs 0 and 1 of each four, then those of 2 and 3, of two tiles and six rows at once, so
// that each value read is multiplied with two weights and each weight with six values.
constexpr int FP8_GROUP = 128, FP8_LINES = FP8_GROUP / 4, FP8_TILES = 2, FP8_ROWS = 6;
constexpr int LEAST_FP8_ROWS = 12, MOST_FP8_ROWS = 64;

struct Fp8Group {
    alignas(64) float weights[FP8_TILES][4][FP8_LINES][TILE_OUTPUTS];
    __m512 scales[FP8_TILES];
    const char* codes[FP8_TILES];
};

// rows[m].values + first: of the group; sums [M, T, TILE_OUTPUTS]. A line is asked for per step from
// `ask` on, if HAS_ASK. The first rows of a group decode it for the others, beside their own
// multiplications.
template <int T, int M, bool HAS_ASK, bool DECODES>
__attribute__((noinline)) void add_fp8_rows(Fp8Group& group, const PackedRow* rows, int64_t first,
                                            float* sums, const char* ask) {
    const float* x[M];
    alignas(64) float halves[M][T][TILE_OUTPUTS];
    each<M>(HR_EACH(m) { x[m] = rows[m].values + first; });
    each<2>(HR_EACH(half) {
        __m512 found[T][M][2];
        each<T * M * 2>(HR_EACH(i) { found[i / 2 / M][i / 2 % M][i % 2] = _mm512_setzero_ps(); });
        for (int line = 0; line < FP8_LINES; line++) {
            if (HAS_ASK && half == 0) Avx512::prefetch(ask + line * LINE_BYTES);
            __m512 w[T][2];
            each<T>(HR_EACH(t) {
                if constexpr (DECODES && half == 0) {
                    __m512 all[4];
                    Avx512::decode_fp8(group.codes[t] + line * LINE_BYTES, all);
                    each<4>(HR_EACH(j) { _mm512_store_ps(group.weights[t][j][line], all[j]); });
                    each<2>(HR_EACH(j) { w[t][j] = all[j]; });
                } else {
                    each<2>(HR_EACH(j) {
                        w[t][j] = _mm512_load_ps(group.weights[t][half * 2 + j][line]);
                    });
                }
            });
            each<M * 2>(HR_EACH(i) {
                constexpr int m = i / 2, j = i % 2;
                const __m512 value = _mm512_set1_ps(x[m][line * 4 + half * 2 + j]);
                each<T>(HR_EACH(t) {
                    found[t][m][j] = _mm512_fmadd_ps(w[t][j], value, found[t][m][j]);
                });
            });
        }
        each<T * M>(HR_EACH(i) {
            constexpr int t = i / M, m = i % M;
            const __m512 both = _mm512_add_ps(found[t][m][0], found[t][m][1]);
            if constexpr (half == 0) {
                _mm512_store_ps(halves[m][t], both);
            } else {
                float* sum = sums + (m * T + t) * TILE_OUTPUTS;
                const __m512 all = _mm512_add_ps(_mm512_load_ps(halves[m][t]), both);
                _mm512_store_ps(sum, _mm512_fmadd_ps(all, group.scales[t], _mm512_load_ps(sum)));
            }
        });
    });
}

using AddFp8Rows = void (*)(Fp8Group&, const PackedRow*, int64_t, float*, const char*);

template <int T, bool HAS_ASK, bool DECODES>
AddFp8Rows fp8_rows_for(int num_rows) {
    static constexpr AddFp8Rows ADDS[FP8_ROWS] = {
        add_fp8_rows<T, 1, HAS_ASK, DECODES>, add_fp8_rows<T, 2, HAS_ASK, DECODES>,
        add_fp8_rows<T, 3, HAS_ASK, DECODES>, add_fp8_rows<T, 4, HAS_ASK, DECODES>,
        add_fp8_rows<T, 5, HAS_ASK, DECODES>, add_fp8_rows<T, 6, HAS_ASK, DECODES>,
    };
    return ADDS[num_rows - 1];
}

// Tiles tile .. tile + T of at most MOST_FP8_ROWS rows.
template <int T>
void multiply_fp8_tiles(const PackedProduct& p, int tile) {
    const PackedFormat& format = *p.format;
    Fp8Group group;
    alignas(64) float sums[MOST_FP8_ROWS * T * TILE_OUTPUTS] = {};
    const int num_blocks = (p.num_rows + FP8_ROWS - 1) / FP8_ROWS;
    const int64_t group_bytes = format.record_scale_bytes + format.group_code_bytes;
    const char* record = p.tiles + tile * p.tile_bytes;
    for (int64_t number = 0; number < p.num_groups; number++, record += group_bytes) {
        for (int t = 0; t < T; t++) {
            const char* of_tile = record + t * p.tile_bytes;
            group.scales[t] = Avx512::multiply(Avx512::load(of_tile), 256.0f);
            group.codes[t] = of_tile + format.record_scale_bytes;
        }
        // The next group or, behind the last one, the first of the tiles that follow.
        const char* ask = record + group_bytes;
        if (number + 1 == p.num_groups) ask += (T - 1) * p.tile_bytes;
        for (int block = 0, row = 0; block < num_blocks; block++) {
            const int num_rows = (p.num_rows - row) / (num_blocks - block);
            const auto add = block == 0  ? fp8_rows_for<T, true, true>(num_rows)
                             : block < T ? fp8_rows_for<T, true, false>(num_rows)
                                         : fp8_rows_for<T, false, false>(num_rows);
            add(group, p.rows + row, number * FP8_GROUP, sums + row * T * TILE_OUTPUTS,
                ask + block * p.tile_bytes);
            row += num_rows;
        }
    }
    for (int m = 0; m < p.num_rows; m++)
        for (int t = 0; t < T; t++)
            _mm512_storeu_ps(p.out + m * p.out_stride + (tile + t) * TILE_OUTPUTS,
                             _mm512_load_ps(sums + (m * T + t) * TILE_OUTPUTS));
}

void multiply_fp8(const PackedProduct& p) {
    in_passes(p, MOST_FP8_ROWS, [](const PackedProduct& some) {
        if (some.num_rows < LEAST_FP8_ROWS) return multiply_packed<Avx512, HR_FP8>(some);
        int tile = 0;
        for (; tile + FP8_TILES <= some.num_tiles; tile += FP8_TILES)
            multiply_fp8_tiles<FP8_TILES>(some, tile);
        if (tile < some.num_tiles) multiply_fp8_tiles<1>(some, tile);
    });
}

// Zen 4 brings one row's weights fastest into the first-level cache from near ahead and into the second
// one from farther, in few streams (docs/performance.md).
struct AmdReading {
    static constexpr int STREAMS = 4, AHEAD_BYTES = 256, FARTHER_BYTES = 1024;
};

template <class Reading>
constexpr PackedKernels kernels_of() {
    return {{multiply_packed<Avx512, HR_INT8, Reading>, multiply_packed<Avx512, HR_INT4, Reading>,
             multiply_packed<Avx512, HR_MXFP4, Reading>, multiply_packed<Avx512, HR_NVFP4, Reading>,
             multiply_fp8},
            quantise_avx512};
}

}  // namespace

extern const PackedKernels avx512_packed = kernels_of<UsualReading>();
extern const PackedKernels avx512_amd_packed = kernels_of<AmdReading>();
