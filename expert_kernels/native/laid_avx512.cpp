// AVX512_BF16 for bfloat16 experts (kernels.h, LaidProduct): one instruction multiplies 32 inputs of
// an output with those of a row and adds them, in pairs, to 16 sums.
//
// Rows lie as they are, one after the other, padded with zeros to laid_depth.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "lane_sums.h"

namespace {

constexpr int LINE_BYTES = 64;
constexpr int ITEM_BYTES = 2;
static_assert(LAID_INPUTS * ITEM_BYTES == LINE_BYTES);
// How far ahead each of the streams that weights come in is asked for.
constexpr int PREFETCH_BYTES = 256;
// For up to so many rows weights come in eight streams, else in four, each line then being used
// for as many rows as there are registers for the sums of.
constexpr int FEW_ROWS = 3, ROWS_AT_ONCE = 6;

// What to ask memory for while a tile is multiplied: a line per step and stream from `begin` on,
// from step number `turn` on from `next`.
struct Ask {
    const char* begin;
    int turn;
    const char* next;
};

template <int R, int M>
__attribute__((always_inline)) inline void multiply_inputs(const __m512i (&weights)[R],
                                                           const char* const (&x)[M],
                                                           int64_t offset, __m512 (&sums)[M][R]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        const __m512i values = _mm512_load_si512(x[m] + offset);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            sums[m][r] = _mm512_dpbf16_ps(sums[m][r], (__m512bh)weights[r], (__m512bh)values);
    }
}

// Outputs output + r * apart, r < R, of rows row .. row + M; P streams are asked for.
template <int R, int M, int P>
__attribute__((noinline)) void multiply_tile(const LaidProduct& p, int output, int apart, int row,
                                             const Ask& ask) {
    const int64_t apart_bytes = apart * p.stride_bytes;
    const int64_t laid_bytes = (p.depth + LAID_INPUTS - 1) / LAID_INPUTS * LINE_BYTES;
    const char *w[R], *x[M], *ahead = ask.begin;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) w[r] = p.weights + output * p.stride_bytes + r * apart_bytes;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
        x[m] = reinterpret_cast<const char*>(p.x) + (row + m) * laid_bytes;
    __m512 sums[M][R];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[m][r] = _mm512_setzero_ps();
    const int whole = p.depth / LAID_INPUTS;
    int64_t offset = 0;
    for (int k = 0; k < whole; k++, offset += LINE_BYTES, ahead += LINE_BYTES) {
        if (k == ask.turn) ahead = ask.next;
#pragma GCC unroll 8
        for (int r = 0; r < P; r++) {
            // What only the next tile reads would push out of the first-level cache what this one does.
            if constexpr (P == R)
                _mm_prefetch(ahead + r * apart_bytes, _MM_HINT_T0);
            else
                _mm_prefetch(ahead + r * apart_bytes, _MM_HINT_T1);
        }
        __m512i weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) weights[r] = _mm512_loadu_si512(w[r] + offset);
        multiply_inputs<R, M>(weights, x, offset, sums);
    }
    if (p.depth % LAID_INPUTS) {
        // Beyond the end of a row lies another, or nothing: what meets zeros may be no number.
        const __mmask32 inside = (1u << p.depth % LAID_INPUTS) - 1;
        __m512i weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) weights[r] = _mm512_maskz_loadu_epi16(inside, w[r] + offset);
        multiply_inputs<R, M>(weights, x, offset, sums);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
        store_lane_sums<R>(sums[m], p.out + (row + m) * p.out_stride + output, apart);
}

using Tile = void (*)(const LaidProduct&, int output, int apart, int row, const Ask&);

template <int R, int P>
Tile tile_for(int num_rows) {
    constexpr int MOST = R > 4 ? FEW_ROWS : ROWS_AT_ONCE;
    static constexpr Tile TILES[ROWS_AT_ONCE] = {
        multiply_tile<R, 1, P>,
        multiply_tile<R, 2, P>,
        multiply_tile<R, 3, P>,
        multiply_tile<R, MOST < 4 ? 1 : 4, P>,
        multiply_tile<R, MOST < 5 ? 1 : 5, P>,
        multiply_tile<R, MOST < 6 ? 1 : 6, P>,
    };
    return TILES[num_rows - 1];
}

// R streams through `num_outputs` outputs from `first` on, each through a stretch of adjacent ones.
template <int R>
void multiply_streams(const LaidProduct& p, int first, int num_outputs, const char* next) {
    constexpr int MOST = R > 4 ? FEW_ROWS : ROWS_AT_ONCE;
    const int apart = num_outputs / R;
    const int64_t apart_bytes = apart * p.stride_bytes;
    // Rows in blocks as equal as can be.
    const int num_blocks = (p.num_rows + MOST - 1) / MOST;
    for (int output = first; output < first + apart; output++) {
        const char* weights = p.weights + output * p.stride_bytes;
        const char* after = output + 1 < first + apart ? weights + p.stride_bytes : next;
        const int turn = p.depth / LAID_INPUTS - PREFETCH_BYTES / LINE_BYTES;
        for (int block = 0, row = 0; block < num_blocks; block++) {
            const int num_rows = (p.num_rows - row) / (num_blocks - block);
            if (num_blocks == 1) {
                tile_for<R, R>(num_rows)(p, output, apart, row,
                                         {weights + PREFETCH_BYTES, turn, after});
            } else if constexpr (R == 4) {
                // The weights are in a cache already: each block of rows asks for a share of those
                // that come after them.
                const int share = num_blocks < R ? 2 : 1;
                const Ask ask{after + block * share * apart_bytes, -1, nullptr};
                if (block * share >= R)
                    tile_for<R, 0>(num_rows)(p, output, apart, row, ask);
                else if (share == 2)
                    tile_for<R, 2>(num_rows)(p, output, apart, row, ask);
                else
                    tile_for<R, 1>(num_rows)(p, output, apart, row, ask);
            } else {
                tile_for<R, 0>(num_rows)(p, output, apart, row, {weights, -1, nullptr});
            }
            row += num_rows;
        }
    }
}

void multiply(const LaidProduct& p) {
    const int streams = p.num_rows <= FEW_ROWS ? 8 : 4;
    const int whole = p.num_outputs / streams * streams;
    const char* next = p.next ? p.next : p.weights;
    if (streams == 8)
        multiply_streams<8>(p, 0, whole, next);
    else
        multiply_streams<4>(p, 0, whole, next);
    multiply_streams<1>(p, whole, p.num_outputs - whole, next);
}

void lay(const char* const* rows, int num_rows, int64_t first, int64_t count, int64_t end,
         int64_t laid_depth, uint16_t* to) {
    for (int m = 0; m < num_rows; m++) {
        uint16_t* row = to + m * laid_depth;
        memcpy(row + first, rows[m], size_t(count) * ITEM_BYTES);
        memset(row + first + count, 0, size_t(end - first - count) * ITEM_BYTES);
    }
}

}  // namespace

extern const LaidKernels avx512_laid = {lay, multiply};
