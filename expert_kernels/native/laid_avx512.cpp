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
// Weights come in so many streams, each line being used for as many rows as there are registers for the
// sums of.
constexpr int STREAMS = 4, ROWS_AT_ONCE = 6;
// How far ahead each of them is asked for into the first-level cache and, where no row has to wait for
// another, into the second one.
constexpr int NEAR_BYTES = 256, FAR_BYTES = 1280;

// What to ask memory for while a tile is multiplied: a line per step and stream from `begin` on,
// from step number `turn` on from `next`.
struct Ask {
    const char* begin;
    int turn;
    const char* next;

    // A step's lines into a cache.
    template <int P, _mm_hint HINT>
    __attribute__((always_inline)) void step(int k, int64_t apart_bytes) {
        if (k == turn) begin = next;
#pragma GCC unroll 8
        for (int r = 0; r < P; r++) _mm_prefetch(begin + r * apart_bytes, HINT);
        begin += LINE_BYTES;
    }
};

// What lies `bytes` ahead of `weights`, of which `num_lines` are left; behind the last one, what lies at
// `next`.
inline Ask ask_ahead(const char* weights, int num_lines, int bytes, const char* next) {
    const int turn = num_lines - bytes / LINE_BYTES;
    return turn >= 0 ? Ask{weights + bytes, turn, next} : Ask{next - turn * LINE_BYTES, -1, nullptr};
}

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

// Outputs output + r * apart, r < R, of rows row .. row + M; P streams are asked for, as `far` says into
// the second-level cache and, if all are, as `near` says into the first one.
template <int R, int M, int P>
__attribute__((noinline)) void multiply_tile(const LaidProduct& p, int output, int apart, int row,
                                             Ask near, Ask far) {
    const int64_t apart_bytes = apart * p.stride_bytes;
    const int64_t laid_bytes = (p.depth + LAID_INPUTS - 1) / LAID_INPUTS * LINE_BYTES;
    const char *w[R], *x[M];
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
    for (int k = 0; k < whole; k++, offset += LINE_BYTES) {
        if constexpr (P == R) near.step<P, _MM_HINT_T0>(k, apart_bytes);
        far.step<P, _MM_HINT_T1>(k, apart_bytes);
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

using Tile = void (*)(const LaidProduct&, int output, int apart, int row, Ask near, Ask far);

template <int R, int P>
Tile tile_for(int num_rows) {
    static constexpr Tile TILES[ROWS_AT_ONCE] = {multiply_tile<R, 1, P>, multiply_tile<R, 2, P>,
                                                 multiply_tile<R, 3, P>, multiply_tile<R, 4, P>,
                                                 multiply_tile<R, 5, P>, multiply_tile<R, 6, P>};
    return TILES[num_rows - 1];
}

// R streams through `num_outputs` outputs from `first` on, each through a stretch of adjacent ones.
template <int R>
void multiply_streams(const LaidProduct& p, int first, int num_outputs, const char* next) {
    const int apart = num_outputs / R, num_lines = p.depth / LAID_INPUTS;
    const int64_t apart_bytes = apart * p.stride_bytes;
    // Rows in blocks as equal as can be.
    const int num_blocks = (p.num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int output = first; output < first + apart; output++) {
        const char* weights = p.weights + output * p.stride_bytes;
        const char* after = output + 1 < first + apart ? weights + p.stride_bytes : next;
        for (int block = 0, row = 0; block < num_blocks; block++) {
            const int num_rows = (p.num_rows - row) / (num_blocks - block);
            if (num_blocks == 1) {
                tile_for<R, R>(num_rows)(p, output, apart, row,
                                         ask_ahead(weights, num_lines, NEAR_BYTES, after),
                                         ask_ahead(weights, num_lines, FAR_BYTES, after));
            } else if constexpr (R == STREAMS) {
                // The weights are in a cache already: each block of rows asks for a share of those
                // that come after them.
                const int share = num_blocks < R ? 2 : 1;
                const Ask ask{after + block * share * apart_bytes, -1, nullptr};
                if (block * share >= R)
                    tile_for<R, 0>(num_rows)(p, output, apart, row, {}, ask);
                else if (share == 2)
                    tile_for<R, 2>(num_rows)(p, output, apart, row, {}, ask);
                else
                    tile_for<R, 1>(num_rows)(p, output, apart, row, {}, ask);
            } else {
                tile_for<R, 0>(num_rows)(p, output, apart, row, {}, {});
            }
            row += num_rows;
        }
    }
}

void multiply(const LaidProduct& p) {
    const int whole = p.num_outputs / STREAMS * STREAMS;
    const char* next = p.next ? p.next : p.weights;
    multiply_streams<STREAMS>(p, 0, whole, next);
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
