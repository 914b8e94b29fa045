// AMX for bfloat16 experts (kernels.h, LaidProduct): 16 outputs by 16 rows by 32 inputs at once.
//
// Weights are read where they lie, 16 outputs as the rows of one tile; the rows of values are the
// columns. One row alone goes the same way with one column, since another instruction would add in
// another order; what it takes is the time of reading the weights all the same.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int LINE_BYTES = 64;  // of a tile's row
constexpr int ITEM_BYTES = 2;
// How far ahead each of the streams that weights come in is asked for. Two tiles of weights at once,
// 32 streams, were slower.
constexpr int PREFETCH_BYTES = 512;

// To the compiler's header, tiles and their configuration are loaded from an address; it does not
// know that what was stored there is read.
inline void finish_stores(const void* at) { asm volatile("" : : "r"(at) : "memory"); }

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Tiles: 0, 1 sums of the first and second block of rows, 2 weights, 3 and 4 the rows. Another set of
// the latter three for every other step was no faster, and sometimes slower on a busy machine.
void configure(int num_outputs, const int (&columns)[2]) {
    alignas(64) TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 5; tile++) {
        config.rows[tile] = uint8_t(tile < 3 ? num_outputs : TILE_ROWS);
        config.row_bytes[tile] = uint16_t(tile == 2 ? LINE_BYTES : 4 * columns[tile % 3]);
    }
    finish_stores(&config);
    _tile_loadconfig(&config);
}

// 32 inputs of 16 outputs.
template <int B>
__attribute__((always_inline)) inline void multiply_inputs(const char* weights,
                                                           int64_t apart_bytes,
                                                           const char* const (&x)[B],
                                                           const int64_t (&x_stride)[B]) {
    _tile_loadd(2, weights, apart_bytes);
    _tile_loadd(3, x[0], x_stride[0]);
    _tile_dpbf16ps(0, 2, 3);
    if constexpr (B == 2) {
        _tile_loadd(4, x[1], x_stride[1]);
        _tile_dpbf16ps(1, 2, 4);
    }
}

__attribute__((always_inline)) inline void ask_for(const char* weights, int64_t apart_bytes) {
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++) _mm_prefetch(weights + r * apart_bytes, _MM_HINT_T0);
}

// Outputs output + i * apart, i < num_outputs, for all rows. `next`: what is read after the weights
// of `output`, asked for as those come to their end.
template <int B>
void multiply_tile(const LaidProduct& p, const int (&columns)[2], int output, int apart,
                   int num_outputs, const char* next) {
    const int64_t apart_bytes = apart * p.stride_bytes;
    const int64_t laid_depth = (p.depth + LAID_INPUTS - 1) / LAID_INPUTS * LAID_INPUTS;
    const char *weights = p.weights + output * p.stride_bytes, *ahead = weights + PREFETCH_BYTES;
    const char* x[B];
    int64_t x_stride[B];
    for (int b = 0; b < B; b++) {
        x[b] = reinterpret_cast<const char*>(p.x + b * LAID_BLOCK * laid_depth);
        x_stride[b] = 4 * columns[b];
    }
    _tile_zero(0);
    if constexpr (B == 2) _tile_zero(1);
    const int whole = p.depth / LAID_INPUTS, turn = whole - PREFETCH_BYTES / LINE_BYTES;
    for (int k = 0; k < whole; k++) {
        if (k == turn) ahead = next;
        ask_for(ahead, apart_bytes);
        multiply_inputs<B>(weights, apart_bytes, x, x_stride);
        weights += LINE_BYTES;
        ahead += LINE_BYTES;
        for (int b = 0; b < B; b++) x[b] += TILE_ROWS * x_stride[b];
    }
    const int left_bytes = p.depth % LAID_INPUTS * ITEM_BYTES;
    if (left_bytes) {
        // Beyond the end of a row lies another, or nothing: what meets zeros may be no number.
        alignas(64) char tail[TILE_ROWS][LINE_BYTES] = {};
        for (int r = 0; r < num_outputs; r++)
            memcpy(tail[r], weights + r * apart_bytes, size_t(left_bytes));
        finish_stores(tail);
        multiply_inputs<B>(tail[0], LINE_BYTES, x, x_stride);
    }
    alignas(64) float found[B][TILE_ROWS][LAID_BLOCK];
    _tile_stored(0, found[0], LINE_BYTES);
    if constexpr (B == 2) _tile_stored(1, found[1], LINE_BYTES);
    for (int b = 0; b < B; b++)
        for (int m = 0; m < columns[b]; m++) {
            float* out = p.out + (b * LAID_BLOCK + m) * p.out_stride + output;
            for (int r = 0; r < num_outputs; r++) out[r * apart] = found[b][r][m];
        }
}

// Sixteen streams, each through a stretch of adjacent outputs.
template <int B>
void multiply_blocks(const LaidProduct& p, const int (&columns)[2]) {
    const int apart = p.num_outputs / TILE_ROWS, rest = p.num_outputs % TILE_ROWS;
    if (apart) configure(TILE_ROWS, columns);
    for (int output = 0; output < apart; output++) {
        const bool is_last = output + 1 == apart;
        multiply_tile<B>(p, columns, output, apart, TILE_ROWS,
                         is_last && p.next ? p.next : p.weights + (output + 1) * p.stride_bytes);
    }
    if (rest) {
        const int output = apart * TILE_ROWS;
        configure(rest, columns);
        multiply_tile<B>(p, columns, output, 1, rest, p.weights + output * p.stride_bytes);
    }
    _tile_release();
}

void multiply(const LaidProduct& p) {
    if (p.num_rows > LAID_BLOCK)
        multiply_blocks<2>(p, {LAID_BLOCK, p.num_rows - LAID_BLOCK});
    else
        multiply_blocks<1>(p, {p.num_rows, p.num_rows});
}

// 16 rows of 16 pairs of values become 16 pairs of 16 rows.
void transpose(const char* const (&rows)[LAID_BLOCK], int64_t offset, uint32_t* to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    // a[i + j]: pairs 4 * lane + j of rows i .. i + 3
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + j * 16, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (4 + j) * 16, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (8 + j) * 16, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (12 + j) * 16, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

void lay_block(const char* const* rows, int num_rows, int64_t count, int64_t num_pairs,
               uint32_t* to) {
    int64_t done = 0;
    if (num_rows == LAID_BLOCK) {
        const char* all[LAID_BLOCK];
        for (int m = 0; m < LAID_BLOCK; m++) all[m] = rows[m];
        for (; (done + LAID_BLOCK) * 2 <= count; done += LAID_BLOCK)
            transpose(all, done * 4, to + done * LAID_BLOCK);
    }
    for (int m = 0; m < num_rows; m++) {
        for (int64_t i = done; i < count / 2; i++)
            memcpy(to + i * num_rows + m, rows[m] + i * 4, 4);
        for (int64_t i = count / 2; i < num_pairs; i++) to[i * num_rows + m] = 0;
        if (count % 2) memcpy(to + count / 2 * num_rows + m, rows[m] + count / 2 * 4, ITEM_BYTES);
    }
}

void lay(const char* const* rows, int num_rows, int64_t first, int64_t count, int64_t end,
         int64_t laid_depth, uint16_t* to) {
    for (int done = 0; done < num_rows; done += LAID_BLOCK) {
        const int left = num_rows - done, size = left < LAID_BLOCK ? left : LAID_BLOCK;
        uint32_t* block = reinterpret_cast<uint32_t*>(to + done * laid_depth);
        lay_block(rows + done, size, count, (end - first) / 2, block + first / 2 * size);
    }
}

}  // namespace

extern const LaidKernels amx_laid = {lay, multiply};
