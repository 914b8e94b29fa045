// AMX for many rows: products of bytes of 16 rows by 16 outputs at once, exact as all the others are.
//
// A row's 16-bit codes lie as upper and lower bytes, both with a sign (packed_template.h), so a group
// is two products of bytes; AMX adds them up as 32-bit integers, and what follows is done in the
// order of packed.h. Few rows, nvfp4 (groups too short) and fp8 (no integers) go the AVX-512 way.

#include <immintrin.h>

#include <cstdlib>

#include "packed_template.h"

namespace {

constexpr int BLOCK_ROWS = 16;
// Fewer rows in a block take less time without. Groups of 32 gain little: what a group's integers
// take to become float32 is then most of the time.
template <int KIND>
constexpr int LEAST_ROWS = KIND == HR_INT8 ? 6 : 14;

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

thread_local ThreadMemory row_memory, weight_memory;

// Tiles: 0 .. 3 sums of (output tile 0, upper), (0, lower), (1, upper), (1, lower); 4, 5 upper and
// lower bytes of the rows; 6, 7 weights of both output tiles.
void configure(int chunk) {
    alignas(64) TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
        config.rows[tile] = tile < 6 ? BLOCK_ROWS : uint8_t(chunk / 4);
        config.row_bytes[tile] = tile == 4 || tile == 5 ? uint16_t(chunk) : 64;
    }
    finish_stores(&config);
    _tile_loadconfig(&config);
}

// A block of rows, per group: upper bytes and lower bytes of each row, then the rows' scales, then
// the sums of their codes; zeros for rows that there are not.
int64_t gathered_bytes(const PackedFormat& format) {
    return int64_t(BLOCK_ROWS) * (2 * format.group_size + 4 + 4);
}

void gather_rows(const PackedProduct& p, int first, int num_rows, char* to) {
    const int row_bytes = 2 * p.format->group_size;
    const int64_t group_bytes = gathered_bytes(*p.format);
    memset(to, 0, size_t(p.num_groups * group_bytes));
    for (int m = 0; m < num_rows; m++) {
        const PackedRow& row = p.rows[first + m];
        const char* codes = reinterpret_cast<const char*>(row.codes);
        for (int64_t group = 0; group < p.num_groups; group++) {
            char* at = to + group * group_bytes;
            memcpy(at + m * row_bytes, codes + group * row_bytes, size_t(row_bytes));
            memcpy(at + BLOCK_ROWS * row_bytes + m * 4, row.scales + group, 4);
            memcpy(at + BLOCK_ROWS * (row_bytes + 4) + m * 4, row.sums + group, 4);
        }
    }
}

struct Group {
    const char* codes;
    const char* scales;
    const char* zeros;
};

Group find_group(const PackedProduct& p, int tile, int64_t group) {
    const PackedFormat& format = *p.format;
    const int64_t record_bytes =
        format.record_scale_bytes + format.groups_per_record * format.group_code_bytes;
    const int64_t within = group % format.groups_per_record;
    const char* record = p.tiles + tile * p.tile_bytes + format.header_bytes +
                         group / format.groups_per_record * record_bytes;
    const int scale_bytes = TILE_OUTPUTS * format.scale_bytes;
    return {record + format.record_scale_bytes + within * format.group_code_bytes,
            record + within * scale_bytes,
            record + format.groups_per_record * scale_bytes + within * TILE_OUTPUTS};
}

// 4-bit codes of a tile as bytes with a sign, group after group.
template <int KIND>
void decode_tile(const PackedProduct& p, int tile, char* to) {
    const PackedFormat& format = *p.format;
    const int8_t* values = IS_E2M1<KIND>             ? E2M1_DOUBLED
                           : format.has_zero_points ? INT4_RAW_VALUES
                                                    : INT4_VALUES;
    const __m512i table =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    const __m512i mask = _mm512_set1_epi8(15);
    for (int64_t group = 0; group < p.num_groups; group++) {
        const char* codes = find_group(p, tile, group).codes;
        for (int at = 0; at < format.group_code_bytes; at += LINE_BYTES, to += 2 * LINE_BYTES) {
            _mm_prefetch(codes + at + PACKED_PREFETCH_BYTES, _MM_HINT_T0);
            const __m512i line = _mm512_loadu_si512(codes + at);
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
            _mm512_store_si512(to, _mm512_shuffle_epi8(table, _mm512_and_si512(line, mask)));
            _mm512_store_si512(to + LINE_BYTES, _mm512_shuffle_epi8(table, high));
        }
    }
}

__m512 load_scales(int kind, const char* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (kind == HR_SCALE_FLOAT32) return _mm512_loadu_ps(from);
    if (kind == HR_SCALE_FLOAT16) return _mm512_cvtph_ps(words);
    if (kind == HR_SCALE_BFLOAT16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(words)), 23));
}

using Integers = int32_t[2][2][BLOCK_ROWS][TILE_OUTPUTS];  // [output tile][upper, lower]

// The products of one group of T output tiles with a block of rows.
template <int T>
__attribute__((always_inline)) inline void multiply_group(const char* rows,
                                                          const char* const (&weights)[T],
                                                          int group_size, int chunk,
                                                          Integers& found) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (T == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < group_size; k += chunk) {
        _tile_loadd(4, rows + k, 2 * group_size);
        _tile_loadd(5, rows + group_size + k, 2 * group_size);
        _tile_loadd(6, weights[0] + k * TILE_OUTPUTS, LINE_BYTES);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 5, 6);
        if constexpr (T == 2) {
            _tile_loadd(7, weights[1] + k * TILE_OUTPUTS, LINE_BYTES);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_stored(0, found[0][0], LINE_BYTES);
    _tile_stored(1, found[0][1], LINE_BYTES);
    if constexpr (T == 2) {
        _tile_stored(2, found[1][0], LINE_BYTES);
        _tile_stored(3, found[1][1], LINE_BYTES);
    }
}

// T output tiles from number `tile` on, for the rows first .. first + num_rows, gathered at `rows`;
// `decoded`: the tiles' weights as bytes, or null where they are bytes in the store.
template <int KIND, int T>
void multiply_block(const PackedProduct& p, int tile, int first, int num_rows, const char* rows,
                    const char* decoded) {
    const PackedFormat& format = *p.format;
    const int group_size = format.group_size, chunk = group_size < 64 ? group_size : 64;
    const int64_t decoded_bytes = int64_t(p.num_groups) * group_size * TILE_OUTPUTS;
    const int64_t group_bytes = gathered_bytes(format);
    alignas(64) Integers found[2];  // of this group and the one before
    alignas(64) float sums[T][BLOCK_ROWS][TILE_OUTPUTS] = {};
    const auto add = [&](int64_t group) __attribute__((always_inline)) {
        const Integers& integers = found[group & 1];
        for (int t = 0; t < T; t++) {
            const Group at = find_group(p, tile + t, group);
            const __m512 scale =
                load_scales(KIND == HR_MXFP4 ? HR_SCALE_E8M0 : format.scale, at.scales);
            const __m512i zero = _mm512_cvtepu8_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(at.zeros)));
            const char* block = rows + group * group_bytes + BLOCK_ROWS * 2 * group_size;
            const float* row_scales = reinterpret_cast<const float*>(block);
            const int32_t* row_sums = reinterpret_cast<const int32_t*>(block) + BLOCK_ROWS;
#pragma GCC unroll 16
            for (int m = 0; m < BLOCK_ROWS; m++) {
                const __m512i upper = _mm512_load_si512(integers[t][0][m]);
                __m512i integer = _mm512_add_epi32(_mm512_slli_epi32(upper, 8),
                                                   _mm512_load_si512(integers[t][1][m]));
                if (KIND == HR_INT4 && format.has_zero_points)
                    integer = _mm512_sub_epi32(
                        integer, _mm512_mullo_epi32(zero, _mm512_set1_epi32(row_sums[m])));
                const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(row_scales[m]));
                _mm512_store_ps(sums[t][m], _mm512_fmadd_ps(_mm512_cvtepi32_ps(integer), both,
                                                            _mm512_load_ps(sums[t][m])));
            }
        }
    };
    for (int64_t group = 0; group < p.num_groups; group++) {
        const char* weights[T];
        for (int t = 0; t < T; t++)
            weights[t] = decoded
                             ? decoded + t * decoded_bytes + group * group_size * TILE_OUTPUTS
                             : find_group(p, tile + t, group).codes;
        multiply_group<T>(rows + group * group_bytes, weights, group_size, chunk,
                          found[group & 1]);
        if (group) add(group - 1);
    }
    add(p.num_groups - 1);
    const __m512 factor = _mm512_set1_ps(KIND == HR_MXFP4 ? 0.5f : 1.0f);
    for (int t = 0; t < T; t++)
        for (int m = 0; m < num_rows; m++)
            _mm512_storeu_ps(
                p.out + (first + m) * p.out_stride + (tile + t) * TILE_OUTPUTS,
                _mm512_mul_ps(_mm512_load_ps(sums[t][m]), factor));
}

template <int KIND, int T>
void multiply_blocks(const PackedProduct& p, int tile, int num_rows, const char* rows,
                     char* decoded) {
    const PackedFormat& format = *p.format;
    const int64_t decoded_bytes = int64_t(p.num_groups) * format.group_size * TILE_OUTPUTS;
    const int64_t block_bytes = p.num_groups * gathered_bytes(format);
    if (!HAS_BYTES<KIND>)
        for (int t = 0; t < T; t++)
            decode_tile<KIND>(p, tile + t, decoded + t * decoded_bytes);
    finish_stores(rows);
    for (int first = 0; first < num_rows; first += BLOCK_ROWS, rows += block_bytes) {
        const int left = num_rows - first;
        multiply_block<KIND, T>(p, tile, first, left < BLOCK_ROWS ? left : BLOCK_ROWS, rows,
                                HAS_BYTES<KIND> ? nullptr : decoded);
    }
}

template <int KIND>
void multiply_amx(const PackedProduct& p) {
    const int rest = p.num_rows % BLOCK_ROWS;
    const int num_rows = rest < LEAST_ROWS<KIND> ? p.num_rows - rest : p.num_rows;
    const int64_t depth = int64_t(p.num_groups) * p.format->group_size;
    const int64_t block_bytes = p.num_groups * gathered_bytes(*p.format);
    const int num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    char *rows = nullptr, *decoded = nullptr;
    if (num_rows) {
        rows = row_memory.at_least(size_t(num_blocks * block_bytes));
        decoded = weight_memory.at_least(size_t(2 * depth * TILE_OUTPUTS));
    }
    if (!rows || !decoded) return avx512_packed.multiply[KIND - 1](p);
    for (int block = 0; block < num_blocks; block++) {
        const int first = block * BLOCK_ROWS, left = num_rows - first;
        gather_rows(p, first, left < BLOCK_ROWS ? left : BLOCK_ROWS, rows + block * block_bytes);
    }
    configure(p.format->group_size < 64 ? p.format->group_size : 64);
    int tile = 0;
    for (; tile + 2 <= p.num_tiles; tile += 2)
        multiply_blocks<KIND, 2>(p, tile, num_rows, rows, decoded);
    if (tile < p.num_tiles) multiply_blocks<KIND, 1>(p, tile, num_rows, rows, decoded);
    _tile_release();
    if (num_rows == p.num_rows) return;
    PackedProduct last = p;
    last.rows += num_rows;
    last.num_rows -= num_rows;
    last.out += num_rows * p.out_stride;
    avx512_packed.multiply[KIND - 1](last);
}

void multiply_nvfp4(const PackedProduct& p) { avx512_packed.multiply[HR_NVFP4 - 1](p); }
void multiply_fp8(const PackedProduct& p) { avx512_packed.multiply[HR_FP8 - 1](p); }

}  // namespace

extern const PackedKernels amx_packed = {
    {multiply_amx<HR_INT8>, multiply_amx<HR_INT4>, multiply_amx<HR_MXFP4>, multiply_nvfp4,
     multiply_fp8},
    quantise_packed<true>};
