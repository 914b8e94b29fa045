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

// fp8 for many rows: a group of a tile is decoded once for all of them, into memory that stays in
// the first-level cache. Every row's sums are made as by the other way, in the same order.
constexpr int FP8_GROUP = 128, FP8_LINES = FP8_GROUP / 4;
constexpr int LEAST_FP8_ROWS = 12, MOST_FP8_ROWS = 64;

// rows[m].values: of the group; sums: of row m at sums + m * TILE_OUTPUTS.
template <int M>
void add_decoded_fp8(const float (&weights)[FP8_LINES][4][TILE_OUTPUTS], __m512 scale,
                     const PackedRow* rows, int64_t first, float* sums) {
    const float* x[M];
    __m512 found[M][4];
    for (int m = 0; m < M; m++) x[m] = rows[m].values + first;
    each<M * 4>(HR_EACH(i) { found[i / 4][i % 4] = _mm512_setzero_ps(); });
    for (int line = 0; line < FP8_LINES; line++)
        each<4>(HR_EACH(j) {
            const __m512 weight = _mm512_load_ps(weights[line][j]);
            each<M>(HR_EACH(m) {
                found[m][j] = Avx512Lines::fma(weight, x[m][line * 4 + j], found[m][j]);
            });
        });
    each<M>(HR_EACH(m) {
        float* sum = sums + m * TILE_OUTPUTS;
        const __m512 all = _mm512_add_ps(_mm512_add_ps(found[m][0], found[m][1]),
                                         _mm512_add_ps(found[m][2], found[m][3]));
        _mm512_storeu_ps(sum, _mm512_fmadd_ps(all, scale, _mm512_loadu_ps(sum)));
    });
}

template <int M>
int add_decoded_rows(const float (&weights)[FP8_LINES][4][TILE_OUTPUTS], __m512 scale,
                     const PackedProduct& p, int64_t first, float* sums, int row) {
    for (; row + M <= p.num_rows; row += M)
        add_decoded_fp8<M>(weights, scale, p.rows + row, first, sums + row * TILE_OUTPUTS);
    return row;
}

void multiply_fp8_tile(const PackedProduct& p, int tile) {
    const PackedFormat& format = *p.format;
    alignas(64) float weights[FP8_LINES][4][TILE_OUTPUTS];
    alignas(64) float sums[MOST_FP8_ROWS * TILE_OUTPUTS] = {};
    const char* record = p.tiles + tile * p.tile_bytes;
    for (int64_t group = 0; group < p.num_groups; group++) {
        const char* codes = record + format.record_scale_bytes;
        for (int line = 0; line < FP8_LINES; line++) {
            Avx512::prefetch(codes + line * LINE_BYTES + PACKED_PREFETCH_BYTES);
            __m512 w[4];
            Avx512::decode_fp8(codes + line * LINE_BYTES, w);
            each<4>(HR_EACH(j) { _mm512_store_ps(weights[line][j], w[j]); });
        }
        const __m512 scale = Avx512Lines::multiply(Avx512Lines::load(record), 256.0f);
        const int64_t first = group * FP8_GROUP;
        int row = add_decoded_rows<6>(weights, scale, p, first, sums, 0);
        row = add_decoded_rows<4>(weights, scale, p, first, sums, row);
        row = add_decoded_rows<2>(weights, scale, p, first, sums, row);
        add_decoded_rows<1>(weights, scale, p, first, sums, row);
        record = codes + format.group_code_bytes;
    }
    for (int m = 0; m < p.num_rows; m++)
        _mm512_storeu_ps(p.out + m * p.out_stride + tile * TILE_OUTPUTS,
                         _mm512_load_ps(sums + m * TILE_OUTPUTS));
}

void multiply_fp8(const PackedProduct& p) {
    PackedProduct some = p;
    for (int done = 0; done < p.num_rows; done += some.num_rows) {
        const int left = p.num_rows - done;
        some.rows = p.rows + done;
        some.num_rows = left < MOST_FP8_ROWS ? left : MOST_FP8_ROWS;
        some.out = p.out + done * p.out_stride;
        if (some.num_rows < LEAST_FP8_ROWS)
            multiply_packed<Avx512, HR_FP8>(some);
        else
            for (int tile = 0; tile < p.num_tiles; tile++) multiply_fp8_tile(some, tile);
    }
}

template <int STREAMS>
constexpr PackedKernels kernels_of() {
    return {{multiply_packed<Avx512, HR_INT8, STREAMS>, multiply_packed<Avx512, HR_INT4, STREAMS>,
             multiply_packed<Avx512, HR_MXFP4, STREAMS>,
             multiply_packed<Avx512, HR_NVFP4, STREAMS>, multiply_fp8},
            quantise_packed<true>};
}

}  // namespace

extern const PackedKernels avx512_packed = kernels_of<8>();
extern const PackedKernels avx512_two_streams_packed = kernels_of<2>();
