// The kernels, written once over a vector type V and compiled once per instruction set.
//
// Everything is in an unnamed namespace and uses no inline function of the standard library: a
// function that two files with different instruction sets both emit would be merged by the linker,
// and the wrong one may be kept.
//
// V offers: LANES (16 / LANES vectors make the 16 partial sums), Reg, zero(), load(const float*),
// broadcast(float), store(float*, Reg), fma(a, b, c) = a * b + c in one rounding,
// widen<D>(const char*): LANES weights as float32, reduce(const Reg[16 / LANES]) in the order of
// kernels.h, and prefetch(const char*). Weights are read once, in V::OUTPUTS streams (ONE_ROW_OUTPUTS
// for one row): asking for them V::AHEAD_BYTES ahead keeps the memory busy where a stream crosses into
// another page, at which the processor's own prefetchers start anew. Where V::FARTHER_BYTES is not 0, one
// row's weights are asked for so much farther ahead as well, by ask_for(const char*).
#pragma once

#include <cstdint>
#include <cstring>

#include "experts.h"
#include "kernels.h"

namespace {

template <int D>
constexpr int ITEM_BYTES = D == HR_FLOAT32 ? 4 : 2;


template <class V, int D, int R, int M>
__attribute__((always_inline)) inline void multiply_block(
    const char* const (&w)[R], int offset, const float* const (&x)[M], int k,
    typename V::Reg (&sums)[R][M][NUM_LANES / V::LANES]) {
    for (int v = 0; v < NUM_LANES / V::LANES; v++) {
        typename V::Reg values[M];
        for (int m = 0; m < M; m++) values[m] = V::load(x[m] + k + v * V::LANES);
        for (int r = 0; r < R; r++) {
            const auto weight =
                V::template widen<D>(w[r] + offset + v * V::LANES * ITEM_BYTES<D>);
            for (int m = 0; m < M; m++) sums[r][m][v] = V::fma(weight, values[m], sums[r][m][v]);
        }
    }
}

// Outputs output, output + apart, ... (R of them) of M rows, beginning with `row`.
template <class V, int D, int R, int M>
__attribute__((noinline)) void dot_tile(const Product& p, int output, int apart, int row) {
    constexpr int BLOCK_BYTES = NUM_LANES * ITEM_BYTES<D>;
    const char* w[R];
    const float* x[M];
    typename V::Reg sums[R][M][NUM_LANES / V::LANES];
    for (int r = 0; r < R; r++) w[r] = p.weights + (output + r * apart) * p.stride_bytes;
    for (int m = 0; m < M; m++) x[m] = p.x[row + m];
    for (auto& of_output : sums)
        for (auto& of_row : of_output)
            for (auto& sum : of_row) sum = V::zero();

    const int num_blocks = p.depth / NUM_LANES;
    constexpr int LINE_BYTES = 64;
    constexpr int BLOCKS_PER_STEP = BLOCK_BYTES < LINE_BYTES ? LINE_BYTES / BLOCK_BYTES : 1;
    int block = 0;
    for (; block + BLOCKS_PER_STEP <= num_blocks; block += BLOCKS_PER_STEP) {
        for (int r = 0; r < R; r++) {
            const char* ahead = w[r] + int64_t(block) * BLOCK_BYTES + V::AHEAD_BYTES;
            V::prefetch(ahead);
            if constexpr (V::FARTHER_BYTES > 0 && M == 1) V::ask_for(ahead + V::FARTHER_BYTES);
        }
        for (int step = 0; step < BLOCKS_PER_STEP; step++)
            multiply_block<V, D, R, M>(w, (block + step) * BLOCK_BYTES, x,
                                       (block + step) * NUM_LANES, sums);
    }
    for (; block < num_blocks; block++)
        multiply_block<V, D, R, M>(w, block * BLOCK_BYTES, x, block * NUM_LANES, sums);
    const int num_left = p.depth % NUM_LANES;
    if (num_left) {
        alignas(64) char tails[R][BLOCK_BYTES];
        const char* tail[R];
        for (int r = 0; r < R; r++) {
            memset(tails[r], 0, BLOCK_BYTES);
            memcpy(tails[r], w[r] + int64_t(num_blocks) * BLOCK_BYTES,
                   size_t(num_left) * ITEM_BYTES<D>);
            tail[r] = tails[r];
        }
        multiply_block<V, D, R, M>(tail, 0, x, num_blocks * NUM_LANES, sums);
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++)
            p.out[(row + m) * p.out_stride + output + r * apart] = V::reduce(sums[r][m]);
}

template <class V, int D, int R>
__attribute__((always_inline)) inline void dot_outputs(const Product& p, int output, int apart) {
    int row = 0;
    if constexpr (R > 1) {
        // Many rows: as many sums as registers hold, 2 outputs or more by V::ROWS rows.
        for (; row + V::ROWS <= p.num_rows; row += V::ROWS)
            for (int r = 0; r < R; r += V::OUTPUTS_OF_ROWS)
                dot_tile<V, D, V::OUTPUTS_OF_ROWS, V::ROWS>(p, output + r * apart, apart, row);
        if constexpr (V::ROWS > 2)
            for (; row + 2 <= p.num_rows; row += 2) dot_tile<V, D, R, 2>(p, output, apart, row);
    }
    for (; row < p.num_rows; row++) dot_tile<V, D, R, 1>(p, output, apart, row);
}

// R streams, each through a stretch of adjacent rows: with adjacent rows side by side instead, streams
// would end after one row and jump, and rows of a few KB read 1.5x slower.
template <class V, int D, int R>
void dot_streams(const Product& p) {
    const int apart = p.num_outputs / R;
    for (int output = 0; output < apart; output++) dot_outputs<V, D, R>(p, output, apart);
    for (int output = apart * R; output < p.num_outputs; output++)
        dot_outputs<V, D, 1>(p, output, 1);
}

template <class V, int D>
void dot_rows(const Product& p) {
    if (V::ONE_ROW_OUTPUTS != V::OUTPUTS && p.num_rows == 1)
        dot_streams<V, D, V::ONE_ROW_OUTPUTS>(p);
    else
        dot_streams<V, D, V::OUTPUTS>(p);
}

// K rows of the weights times K values, added to the sums of a stretch of outputs. Sums lie in
// memory (first-level cache), so that each row of the weights is read in long stretches.
template <class V, int D, int K>
__attribute__((always_inline)) inline void add_columns(
    const Product& p, const float* x, float* out, int k) {
    typename V::Reg values[K];
    const char* w[K];
    for (int j = 0; j < K; j++) {
        values[j] = V::broadcast(x[k + j]);
        w[j] = p.weights + (k + j) * p.stride_bytes;
    }
    int n = 0;
    for (; n + NUM_LANES <= p.num_outputs; n += NUM_LANES) {
        const int64_t offset = int64_t(n) * ITEM_BYTES<D>;
        for (int j = 0; j < K; j++) V::prefetch(w[j] + offset + K * p.stride_bytes);
        for (int v = 0; v < NUM_LANES; v += V::LANES) {
            auto sum = V::load(out + n + v);
            for (int j = 0; j < K; j++)
                sum = V::fma(V::template widen<D>(w[j] + offset + v * ITEM_BYTES<D>), values[j],
                             sum);
            V::store(out + n + v, sum);
        }
    }
    const int num_left = p.num_outputs - n;
    if (num_left) {
        alignas(64) char tails[K][NUM_LANES * ITEM_BYTES<D>];
        alignas(64) float sums[NUM_LANES] = {};
        memset(tails, 0, sizeof tails);
        for (int j = 0; j < K; j++)
            memcpy(tails[j], w[j] + int64_t(n) * ITEM_BYTES<D>, size_t(num_left) * ITEM_BYTES<D>);
        memcpy(sums, out + n, size_t(num_left) * sizeof(float));
        for (int v = 0; v < NUM_LANES; v += V::LANES) {
            auto sum = V::load(sums + v);
            for (int j = 0; j < K; j++)
                sum = V::fma(V::template widen<D>(tails[j] + v * ITEM_BYTES<D>), values[j], sum);
            V::store(sums + v, sum);
        }
        memcpy(out + n, sums, size_t(num_left) * sizeof(float));
    }
}

template <class V, int D>
void sum_columns(const Product& p) {
    constexpr int K = 4;
    for (int m = 0; m < p.num_rows; m++)
        memset(p.out + m * p.out_stride, 0, size_t(p.num_outputs) * sizeof(float));
    int k = 0;
    for (; k + K <= p.depth; k += K)
        for (int m = 0; m < p.num_rows; m++)
            add_columns<V, D, K>(p, p.x[m], p.out + m * p.out_stride, k);
    for (; k < p.depth; k++)
        for (int m = 0; m < p.num_rows; m++)
            add_columns<V, D, 1>(p, p.x[m], p.out + m * p.out_stride, k);
}

template <class V>
constexpr Kernels kernels_of() {
    return {{dot_rows<V, HR_FLOAT32>, dot_rows<V, HR_BFLOAT16>, dot_rows<V, HR_FLOAT16>},
            {sum_columns<V, HR_FLOAT32>, sum_columns<V, HR_BFLOAT16>,
             sum_columns<V, HR_FLOAT16>}};
}

}  // namespace
