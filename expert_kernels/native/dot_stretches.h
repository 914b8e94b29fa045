// dot_rows for three rows and more, where there are registers for the sums of 4 outputs by 6 rows or 3
// outputs by 8 at once (AVX-512); the bits are those of kernel_template.h.
//
// Up to eight rows are multiplied at once, so that weights are used as they come from memory, in as
// many streams as there are outputs. More rows go in blocks.
// Weights are widened once for all rows, by the first of them, beside their multiplications; between
// two stretches of inputs sums wait in memory as they are. While some weights are multiplied the
// next ones are asked for, a share by each block of rows: memory is then busy all the time.
#pragma once

#include <cstdint>
#include <cstring>

#include "experts.h"
#include "kernels.h"
#include "lane_sums.h"

namespace {

constexpr int STRETCH_INPUTS = 2048;
constexpr int STRETCH_OUTPUTS = 4;
template <int R>
constexpr int BLOCK_ROWS = R == STRETCH_OUTPUTS ? 6 : 8;  // of which R outputs are multiplied at once
constexpr int LEAST_FEW_ROWS = 3;
// From so many rows on. With 9 to 11, 16-bit weights come faster in eight streams, widened again for
// each block of rows.
template <int D>
constexpr int LEAST_MANY_ROWS = D == HR_FLOAT32 ? 9 : 12;
constexpr int MOST_MANY_ROWS = 36;  // at once

struct Stretch {
    const char* weights;  // as they are stored
    float* widened;       // [outputs, STRETCH_INPUTS]
    int64_t apart_bytes;  // from one output's to the next one's, of those stored
    int num_steps;        // of NUM_LANES inputs
    bool is_first;
    const char* ask;
    float* out;  // of the first row and output; null while there are inputs left
    int64_t out_stride;
    int64_t out_apart;
};

// Where weights are read: as they are stored and nowhere else, to be widened for others as well, or
// widened.
enum Source { STORED, WIDENING, WIDENED };

// R outputs by M rows, whose values begin at rows[m] + begin; sums [M, R, NUM_LANES]. The weights of P
// outputs are asked for. Sums are kept, or put out when they are whole.
template <class V, int D, Source SOURCE, int R, int M, int P>
__attribute__((noinline)) void add_stretch(const Stretch& s, const float* const* rows,
                                           int64_t begin, float* sums) {
    constexpr int STEP_BYTES = NUM_LANES * ITEM_BYTES<D>;
    typename V::Reg found[M][R];
    const float* x[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) x[m] = rows[m] + begin;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            found[m][r] = s.is_first ? V::zero() : V::load(sums + (m * R + r) * NUM_LANES);
    const char *stored = s.weights, *ask = s.ask;
    float* widened = s.widened;
    const int64_t end = int64_t(s.num_steps) * NUM_LANES;
    for (int64_t at = 0; at < end; at += NUM_LANES) {
#pragma GCC unroll 8
        for (int r = 0; r < P; r++) V::ask_for(ask + r * s.apart_bytes);
        ask += STEP_BYTES;
        typename V::Reg weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if constexpr (SOURCE == WIDENED)
                weights[r] = V::load(widened + r * STRETCH_INPUTS);
            else
                weights[r] = V::template widen<D>(stored + r * s.apart_bytes);
            if constexpr (SOURCE == WIDENING) V::store(widened + r * STRETCH_INPUTS, weights[r]);
        }
        stored += STEP_BYTES;
        widened += NUM_LANES;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            auto values = V::load(x[m] + at);
            // Not in float32: with 3 outputs by 8 rows that took 5 % longer.
            if constexpr (D != HR_FLOAT32) V::keep(values);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) found[m][r] = V::fma(weights[r], values, found[m][r]);
        }
    }
    if (s.out) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            store_lane_sums<R>(found[m], s.out + m * s.out_stride, s.out_apart);
        return;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) V::store(sums + (m * R + r) * NUM_LANES, found[m][r]);
}

using AddStretch = void (*)(const Stretch&, const float* const*, int64_t, float*);

template <class V, int D, Source SOURCE, int R, int P>
AddStretch stretch_for(int num_rows) {
    constexpr int MOST = BLOCK_ROWS<R>;
    static constexpr AddStretch ADDS[] = {
        add_stretch<V, D, SOURCE, R, 1, P>,
        add_stretch<V, D, SOURCE, R, 2, P>,
        add_stretch<V, D, SOURCE, R, 3, P>,
        add_stretch<V, D, SOURCE, R, 4, P>,
        add_stretch<V, D, SOURCE, R, 5, P>,
        add_stretch<V, D, SOURCE, R, 6, P>,
        add_stretch<V, D, SOURCE, R, MOST < 7 ? 1 : 7, P>,
        add_stretch<V, D, SOURCE, R, MOST < 8 ? 1 : 8, P>,
    };
    return ADDS[num_rows - 1];
}

template <class V, int D, Source SOURCE, int R>
AddStretch stretch_for(int num_rows, int num_asked) {
    if (num_asked == 0) return stretch_for<V, D, SOURCE, R, 0>(num_rows);
    if (num_asked == 1) return stretch_for<V, D, SOURCE, R, 1>(num_rows);
    if (num_asked == R) return stretch_for<V, D, SOURCE, R, R>(num_rows);
    return stretch_for<V, D, SOURCE, R, (R + 1) / 2>(num_rows);
}

// The last inputs, fewer than NUM_LANES: padded with zeros.
template <class V, int D, int R>
void add_last_inputs(const Product& p, Stretch s, int row, int num_rows, float* sums) {
    const int left = p.depth % NUM_LANES, begin = p.depth - left;
    alignas(64) char tails[R][NUM_LANES * ITEM_BYTES<D>] = {};
    for (int r = 0; r < R; r++)
        memcpy(tails[r], s.weights + begin * ITEM_BYTES<D> + r * s.apart_bytes,
               size_t(left) * ITEM_BYTES<D>);
    s.weights = tails[0];
    s.apart_bytes = sizeof tails[0];
    s.num_steps = 1;
    s.is_first = begin == 0;
    for (int done = 0, size; done < num_rows; done += size) {
        size = num_rows - done < BLOCK_ROWS<R> ? num_rows - done : BLOCK_ROWS<R>;
        s.out = p.out + (row + done) * p.out_stride;
        stretch_for<V, D, STORED, R, 0>(size)(s, p.x + row + done, begin,
                                              sums + done * R * NUM_LANES);
    }
}

// Outputs 0, apart, ... (R of them) of num_rows <= MOST_MANY_ROWS rows. `next`: what is read after
// their weights.
template <class V, int D, int R>
void dot_stretches(const Product& p, int apart, int row, int num_rows, const char* next) {
    constexpr bool IS_WIDE = D == HR_FLOAT32;
    alignas(64) float widened[IS_WIDE ? 1 : R * STRETCH_INPUTS];
    alignas(64) float sums[MOST_MANY_ROWS * R * NUM_LANES];
    const int num_blocks = (num_rows + BLOCK_ROWS<R> - 1) / BLOCK_ROWS<R>;
    // Each block of rows asks for a share of the outputs.
    const int share = num_blocks == 1 ? R : num_blocks < R ? (R + 1) / 2 : 1;
    Stretch s{p.weights, widened, apart * p.stride_bytes, 0,    true,
              nullptr,   nullptr, p.out_stride,           apart};
    const int whole = p.depth / NUM_LANES * NUM_LANES;
    for (int begin = 0; begin < whole; begin += STRETCH_INPUTS, s.is_first = false) {
        const int left = whole - begin;
        const bool is_last = left <= STRETCH_INPUTS;
        s.weights = p.weights + int64_t(begin) * ITEM_BYTES<D>;
        s.num_steps = (is_last ? left : STRETCH_INPUTS) / NUM_LANES;
        const char* after = is_last ? next : s.weights + STRETCH_INPUTS * ITEM_BYTES<D>;
        for (int block = 0, done = 0; block < num_blocks; block++) {
            const int size = (num_rows - done) / (num_blocks - block);
            const int asked = block * share < R ? share : 0;
            s.ask = after + block * share * s.apart_bytes;
            if (begin + left == p.depth && is_last) s.out = p.out + (row + done) * p.out_stride;
            const auto add = IS_WIDE || num_blocks == 1
                                 ? stretch_for<V, D, STORED, R>(size, asked)
                             : block == 0 ? stretch_for<V, D, WIDENING, R>(size, asked)
                                          : stretch_for<V, D, WIDENED, R>(size, asked);
            add(s, p.x + row + done, begin, sums + done * R * NUM_LANES);
            done += size;
        }
    }
    s.weights = p.weights;
    if (whole < p.depth) add_last_inputs<V, D, R>(p, s, row, num_rows, sums);
}

// R streams, each through a stretch of adjacent outputs.
template <class V, int D, int R>
void dot_few_rows(const Product& p) {
    const int apart = p.num_outputs / R;
    Product some = p;
    for (int output = 0; output < apart; output++, some.weights += p.stride_bytes, some.out++) {
        const bool is_last = output + 1 == apart;
        dot_stretches<V, D, R>(some, apart, 0, p.num_rows,
                               is_last && p.next ? p.next : some.weights + p.stride_bytes);
    }
    some.weights = p.weights + apart * R * p.stride_bytes;
    some.out = p.out + apart * R;
    for (int output = apart * R; output < p.num_outputs; output++, some.out++) {
        const char* after = some.weights + p.stride_bytes;
        dot_stretches<V, D, 1>(some, 1, 0, p.num_rows, after);
        some.weights = after;
    }
}

template <class V, int D>
void dot_many_rows(const Product& p) {
    for (int row = 0; row < p.num_rows; row += MOST_MANY_ROWS) {
        const int left = p.num_rows - row, num_rows = left < MOST_MANY_ROWS ? left : MOST_MANY_ROWS;
        Product some = p;
        int output = 0;
        for (; output + STRETCH_OUTPUTS <= p.num_outputs; output += STRETCH_OUTPUTS) {
            const char* after = some.weights + STRETCH_OUTPUTS * p.stride_bytes;
            const bool is_last = output + STRETCH_OUTPUTS == p.num_outputs;
            dot_stretches<V, D, STRETCH_OUTPUTS>(some, 1, row, num_rows,
                                                 is_last && p.next ? p.next : after);
            some.weights = after;
            some.out += STRETCH_OUTPUTS;
        }
        for (; output < p.num_outputs; output++, some.weights += p.stride_bytes, some.out++)
            dot_stretches<V, D, 1>(some, 1, row, num_rows, some.weights + p.stride_bytes);
    }
}

}  // namespace
