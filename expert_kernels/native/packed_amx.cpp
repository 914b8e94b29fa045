// AMX for many rows: products of bytes of 16 rows by 16 outputs at once, exact as all the others are.
//
// A row's 16-bit codes lie as upper and lower bytes, both with a sign (packed_template.h), so a group
// is two products of bytes; AMX adds them up as 32-bit integers, and what follows is done in the
// order of packed.h. Few rows and fp8 (no integers) go the AVX-512 way.
//
// What takes the time is not the products but what a group's integers take to become float32, for 16
// rows and one tile of outputs at a time, so that their sums stay in registers. A stretch of a tile's
// inputs is decoded once for all rows, into memory that stays in the first-level cache. The integers
// of the group before are taken from memory while the products of the next are under way: two
// buffers within 4 KiB, which was faster than two that are 4 KiB apart (why has not been isolated).

#include <immintrin.h>

#include <cstdlib>

#include "packed_avx512.h"

namespace {

constexpr int BLOCK_ROWS = 16;
constexpr int MOST_ROWS = 64;
constexpr int STRETCH_INPUTS = 512;
// Fewer rows in a block take less time without, as measured from the cache.
template <int KIND>
constexpr int LEAST_ROWS = KIND == HR_INT8 ? 5 : KIND == HR_NVFP4 ? 14 : 8;

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Memory of one thread, freed when it ends; without the standard library's inline functions.
struct ThreadMemory {
    char* data = nullptr;
    size_t num_bytes = 0;

    ~ThreadMemory() { free(data); }
    char* at_least(size_t wanted) {
        if (wanted > num_bytes) {
            free(data);
            num_bytes = (wanted + 63) / 64 * 64;
            data = static_cast<char*>(aligned_alloc(64, num_bytes));
            if (!data) num_bytes = 0;
        }
        return data;
    }
};

// To the compiler's header, tiles and their configuration are loaded from an address; it does not
// know that what was stored there is read.
inline void finish_stores(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

thread_local ThreadMemory row_memory;

template <int KIND_, int GROUP_SIZE_>
struct Shape {
    static constexpr int KIND = KIND_, GROUP_SIZE = GROUP_SIZE_;
    static constexpr int CHUNK = GROUP_SIZE < 64 ? GROUP_SIZE : 64;  // inputs per product
    // A block of rows, per group: upper bytes and lower bytes of each row, then the rows' scales,
    // then the sums of their codes; zeros for rows that there are not.
    static constexpr int ROW_BYTES = 2 * GROUP_SIZE;
    static constexpr int SCALES_AT = BLOCK_ROWS * ROW_BYTES;
    static constexpr int SUMS_AT = SCALES_AT + BLOCK_ROWS * 4;
    static constexpr int BLOCK_BYTES = SUMS_AT + BLOCK_ROWS * 4;
    static constexpr int WEIGHT_BYTES = GROUP_SIZE * TILE_OUTPUTS;  // of a group, a byte each
    static constexpr int GROUPS = STRETCH_INPUTS / GROUP_SIZE;      // of a stretch; whole records
};

// Tiles: 0, 1 sums of upper and of lower bytes; 2, 3 those bytes of the rows; 4 weights. Others for
// every other group made it slower, not faster.
void configure(int chunk, int num_rows) {
    alignas(64) TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 5; tile++) {
        config.rows[tile] = uint8_t(tile < 4 ? num_rows : chunk / 4);
        config.row_bytes[tile] = tile == 2 || tile == 3 ? uint16_t(chunk) : LINE_BYTES;
    }
    finish_stores(&config);
    _tile_loadconfig(&config);
}

template <class S>
void gather_rows(const PackedProduct& p, int first, int num_rows, char* to) {
    const PackedRow* rows = p.rows + first;
    for (int64_t group = 0; group < p.num_groups; group++, to += S::BLOCK_BYTES) {
        for (int m = 0; m < num_rows; m++) {
            memcpy(to + m * S::ROW_BYTES, rows[m].codes + group * S::GROUP_SIZE, S::ROW_BYTES);
            memcpy(to + S::SCALES_AT + m * 4, rows[m].scales + group, 4);
            memcpy(to + S::SUMS_AT + m * 4, rows[m].sums + group, 4);
        }
        if (num_rows == BLOCK_ROWS) continue;
        const size_t missing = size_t(BLOCK_ROWS - num_rows);
        memset(to + num_rows * S::ROW_BYTES, 0, missing * S::ROW_BYTES);
        memset(to + S::SCALES_AT + num_rows * 4, 0, missing * 4);
        memset(to + S::SUMS_AT + num_rows * 4, 0, missing * 4);
    }
}

// A stretch of a tile's weights, ready: per group where its bytes lie, its scales as float32, its
// zero points.
template <class S>
struct Weights {
    alignas(64) char decoded[S::KIND == HR_INT8 ? 1 : S::GROUPS * S::WEIGHT_BYTES];
    alignas(64) float scales[S::GROUPS][TILE_OUTPUTS];
    alignas(64) int32_t zeros[S::KIND == HR_INT4 ? S::GROUPS : 1][TILE_OUTPUTS];
    const char* codes[S::GROUPS];
};

// `num_groups` groups from the record at `record` on; returns the record behind them.
template <class S>
const char* make_ready(const PackedFormat& format, const char* record, int num_groups,
                       Weights<S>& to) {
    const int8_t* values = IS_E2M1<S::KIND>         ? E2M1_DOUBLED
                           : format.has_zero_points ? INT4_RAW_VALUES
                                                    : INT4_VALUES;
    const __m512i table = Avx512Lines::table(values), mask = _mm512_set1_epi8(15);
    const int scale_kind = S::KIND == HR_MXFP4   ? HR_SCALE_E8M0
                           : S::KIND == HR_NVFP4 ? HR_SCALE_E4M3
                                                 : format.scale;
    const int scale_bytes = TILE_OUTPUTS * format.scale_bytes;
    char* decoded = to.decoded;
    for (int first = 0; first < num_groups; first += format.groups_per_record) {
        const int left = num_groups - first;
        const int count = left < format.groups_per_record ? left : format.groups_per_record;
        const char* codes = record + format.record_scale_bytes;
        for (int i = 0; i < count; i++, codes += format.group_code_bytes) {
            const int group = first + i;
            _mm512_store_ps(to.scales[group],
                            Avx512Lines::scale(scale_kind, record + i * scale_bytes));
            if (S::KIND == HR_INT4 && format.has_zero_points) {
                const char* zeros = record + format.groups_per_record * scale_bytes;
                _mm512_store_si512(to.zeros[group],
                                   _mm512_cvtepu8_epi32(_mm_loadu_si128(
                                       reinterpret_cast<const __m128i*>(zeros) + i)));
            }
            to.codes[group] = S::KIND == HR_INT8 ? codes : decoded;
            if constexpr (S::KIND != HR_INT8)
                for (int at = 0; at < S::WEIGHT_BYTES / 2; at += LINE_BYTES) {
                    _mm_prefetch(codes + at + PACKED_PREFETCH_BYTES, _MM_HINT_T0);
                    const __m512i line = _mm512_loadu_si512(codes + at);
                    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
                    const __m512i low = _mm512_and_si512(line, mask);
                    _mm512_store_si512(decoded, _mm512_shuffle_epi8(table, low));
                    _mm512_store_si512(decoded + LINE_BYTES, _mm512_shuffle_epi8(table, high));
                    decoded += 2 * LINE_BYTES;
                }
        }
        record = codes;
    }
    finish_stores(to.decoded);
    return record;
}

using Integers = int32_t[2][BLOCK_ROWS][TILE_OUTPUTS];  // of upper and of lower bytes

// Bytes of a store are read here for the first time; others were when they were decoded.
template <class S>
__attribute__((always_inline)) inline void ask_ahead(const char* weights) {
    if constexpr (S::KIND == HR_INT8)
        each<S::CHUNK / 4>(HR_EACH(line) {
            _mm_prefetch(weights + line * LINE_BYTES + PACKED_PREFETCH_BYTES, _MM_HINT_T0);
        });
}

// The products of one group.
template <class S>
__attribute__((always_inline)) inline void multiply_group(const char* rows, const char* weights,
                                                          Integers& found) {
    _tile_zero(0);
    _tile_zero(1);
    each<S::GROUP_SIZE / S::CHUNK>(HR_EACH(i) {
        constexpr int k = i * S::CHUNK;
        ask_ahead<S>(weights + k * TILE_OUTPUTS);
        _tile_loadd(2, rows + k, S::ROW_BYTES);
        _tile_loadd(3, rows + S::GROUP_SIZE + k, S::ROW_BYTES);
        _tile_loadd(4, weights + k * TILE_OUTPUTS, LINE_BYTES);
        _tile_dpbssd(0, 2, 4);
        _tile_dpbssd(1, 3, 4);
    });
    _tile_stored(0, found[0], LINE_BYTES);
    _tile_stored(1, found[1], LINE_BYTES);
}

template <class S, bool HAS_ZEROS, int M>
__attribute__((always_inline)) inline void add_group(const Weights<S>& weights,
                                                     const char* rows, int group, const Integers& found,
                                                     __m512 (&sums)[M]) {
    const float* row_scales = reinterpret_cast<const float*>(rows + S::SCALES_AT);
    const int32_t* row_sums = reinterpret_cast<const int32_t*>(rows + S::SUMS_AT);
    const __m512 scale = _mm512_load_ps(weights.scales[group]);
    each<M>(HR_EACH(m) {
        __m512i integer = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(found[0][m]), 8),
                                           _mm512_load_si512(found[1][m]));
        if constexpr (HAS_ZEROS)
            integer = _mm512_sub_epi32(
                integer, _mm512_mullo_epi32(_mm512_load_si512(weights.zeros[group]),
                                            _mm512_set1_epi32(row_sums[m])));
        sums[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer),
                                  _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[m])), sums[m]);
    });
}

// A stretch of one tile of outputs for a block of at most M rows, gathered at `rows`.
template <class S, bool HAS_ZEROS, int M>
void multiply_block(const Weights<S>& weights, int num_groups, const char* rows,
                    float (*block_sums)[TILE_OUTPUTS]) {
    alignas(4096) Integers found[2];
    __m512 sums[M];
    each<M>(HR_EACH(m) { sums[m] = _mm512_load_ps(block_sums[m]); });
    multiply_group<S>(rows, weights.codes[0], found[0]);
    int group = 1;
    for (; group + 1 < num_groups; group += 2) {
        const char* at = rows + group * S::BLOCK_BYTES;
        multiply_group<S>(at, weights.codes[group], found[1]);
        add_group<S, HAS_ZEROS, M>(weights, at - S::BLOCK_BYTES, group - 1, found[0], sums);
        multiply_group<S>(at + S::BLOCK_BYTES, weights.codes[group + 1], found[0]);
        add_group<S, HAS_ZEROS, M>(weights, at, group, found[1], sums);
    }
    const char* at = rows + group * S::BLOCK_BYTES;
    if (group < num_groups) multiply_group<S>(at, weights.codes[group], found[1]);
    add_group<S, HAS_ZEROS, M>(weights, at - S::BLOCK_BYTES, group - 1, found[0], sums);
    if (group < num_groups)
        add_group<S, HAS_ZEROS, M>(weights, at, group, found[1], sums);
    each<M>(HR_EACH(m) { _mm512_store_ps(block_sums[m], sums[m]); });
}

// Rows whose integers become float32: no more of them than there are, by and large.
template <class S, bool HAS_ZEROS>
void multiply_rows(const Weights<S>& weights, int num_groups, int num_rows, const char* rows,
                   float (*sums)[TILE_OUTPUTS]) {
    if (num_rows <= 4)
        multiply_block<S, HAS_ZEROS, 4>(weights, num_groups, rows, sums);
    else if (num_rows <= 8)
        multiply_block<S, HAS_ZEROS, 8>(weights, num_groups, rows, sums);
    else
        multiply_block<S, HAS_ZEROS, 16>(weights, num_groups, rows, sums);
}

template <class S>
void multiply_tile(const PackedProduct& p, int tile, int num_rows, const char* rows) {
    const PackedFormat& format = *p.format;
    const int64_t block_bytes = p.num_groups * int64_t(S::BLOCK_BYTES);
    Weights<S> weights;
    alignas(64) float sums[MOST_ROWS][TILE_OUTPUTS] = {};
    const char* start = p.tiles + tile * p.tile_bytes;
    const char* record = start + format.header_bytes;
    for (int done = 0; done < p.num_groups; done += S::GROUPS) {
        const int left = p.num_groups - done, count = left < S::GROUPS ? left : S::GROUPS;
        record = make_ready<S>(format, record, count, weights);
        for (int first = 0; first < num_rows; first += BLOCK_ROWS) {
            const char* block = rows + first / BLOCK_ROWS * block_bytes + done * S::BLOCK_BYTES;
            if (S::KIND == HR_INT4 && format.has_zero_points)
                multiply_rows<S, S::KIND == HR_INT4>(weights, count, num_rows - first, block,
                                                     sums + first);
            else
                multiply_rows<S, false>(weights, count, num_rows - first, block, sums + first);
        }
    }
    __m512 factor = _mm512_set1_ps(0.5f);
    if constexpr (S::KIND == HR_NVFP4) factor = _mm512_mul_ps(_mm512_loadu_ps(start), factor);
    for (int m = 0; m < num_rows; m++) {
        __m512 sum = _mm512_load_ps(sums[m]);
        if constexpr (IS_E2M1<S::KIND>) sum = _mm512_mul_ps(sum, factor);
        _mm512_storeu_ps(p.out + m * p.out_stride + tile * TILE_OUTPUTS, sum);
    }
}

// At most MOST_ROWS rows.
template <class S>
void multiply_some(const PackedProduct& p) {
    const int64_t block_bytes = p.num_groups * int64_t(S::BLOCK_BYTES);
    const int rest = p.num_rows % BLOCK_ROWS;
    int num_rows = rest < LEAST_ROWS<S::KIND> ? p.num_rows - rest : p.num_rows;
    const int num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    char* rows = num_rows ? row_memory.at_least(size_t(num_blocks * block_bytes)) : nullptr;
    if (!rows) num_rows = 0;
    if (num_rows) {
        for (int first = 0; first < num_rows; first += BLOCK_ROWS) {
            const int left = num_rows - first;
            gather_rows<S>(p, first, left < BLOCK_ROWS ? left : BLOCK_ROWS,
                           rows + first / BLOCK_ROWS * block_bytes);
        }
        finish_stores(rows);
        configure(S::CHUNK, num_rows < BLOCK_ROWS ? num_rows : BLOCK_ROWS);
        for (int tile = 0; tile < p.num_tiles; tile++) multiply_tile<S>(p, tile, num_rows, rows);
        _tile_release();
    }
    if (num_rows == p.num_rows) return;
    PackedProduct last = p;
    last.rows += num_rows;
    last.num_rows -= num_rows;
    last.out += num_rows * p.out_stride;
    avx512_packed.multiply[S::KIND - 1](last);
}

template <class S>
void multiply_amx(const PackedProduct& p) {
    in_passes(p, MOST_ROWS, multiply_some<S>);
}

template <int KIND>
void multiply_sized(const PackedProduct& p) {
    if (p.format->group_size == 32) return multiply_amx<Shape<KIND, 32>>(p);
    if (p.format->group_size == 64) return multiply_amx<Shape<KIND, 64>>(p);
    multiply_amx<Shape<KIND, 128>>(p);
}

void multiply_fp8(const PackedProduct& p) { avx512_packed.multiply[HR_FP8 - 1](p); }

}  // namespace

extern const PackedKernels amx_packed = {
    {multiply_sized<HR_INT8>, multiply_sized<HR_INT4>, multiply_amx<Shape<HR_MXFP4, 32>>,
     multiply_amx<Shape<HR_NVFP4, 16>>, multiply_fp8},
    quantise_avx512};
