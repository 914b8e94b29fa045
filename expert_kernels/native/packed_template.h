// The kernels of packed.h, written once over a vector type P and compiled per instruction set; all
// in an unnamed namespace for the reason that kernel_template.h gives.
//
// P offers LANES (dwords of a line that one register holds), ROWS and FLOAT_ROWS (rows whose sums
// are kept at once), TILES and FLOAT_TILES (tiles at once for a single row), the types Int, Words,
// Float, Table, and
//
//   table(values)          from 16 values of a byte each
//   decode_fp8(line, w)    4 inputs: w[j] is weight k+j / 256, as float32
//   minus(sum, zeros, n)   sum - zero point of the lane * n
//   to_float, scale(kind, from), multiply(v, number), multiply(v, v), add, fma(v, v, v),
//   fma(v, number, v), load, store, prefetch
//
// and, unless HAS_BYTE_PRODUCTS, whose codes are words, of each four in the order k, k+2, k+1, k+3:
//
//   decode4(line, t, w)    8 inputs: w[0] (k, k+2)  w[1] (k+4, k+6)  w[2] (k+1, k+3)  w[3] (k+5, k+7)
//   decode8(line, w)       4 inputs: w[0] (k, k+2)  w[1] (k+1, k+3)
//   dot(sum, w, pair)      sum + w.low * pair[0] + w.high * pair[1]
//
// or, with it, whose codes are bytes, all upper ones of the group and then all lower ones, each with
// a sign (code = 256 * upper + lower), and weights are bytes without one, 2^OFFSET_BITS too large:
//
//   decode4(line, t, w)    8 inputs: w[0] k .. k+3  w[1] k+4 .. k+7, looked up if IS_E2M1
//   decode8(line, w)       4 inputs
//   dot(sum, w, quad)      sum + w.byte0 * quad[0] + ... + w.byte3 * quad[3]
//   combine(upper, lower)  256 * upper + lower
//   less(sum, n)           sum - 2^OFFSET_BITS * n
//
// Loops over tiles, rows and parts of a line are written out by `each`: a compiler that keeps such
// a loop keeps its sums in memory instead of registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "packed.h"
#include "packed_quantise.h"

namespace {

// The code stream is read once; asking this far ahead keeps the memory busy across pages.
constexpr int PACKED_PREFETCH_BYTES = 2048;
// Where an instruction set has another distance, it is for up to so many rows: with more, what is
// asked for has to last while several rows take their turns.
constexpr int AHEAD_ROWS = 2;

// What is asked for while a line is read: what lies `usual` bytes farther and, into the second-level
// cache, what lies another `farther` bytes behind that. Streams end: from `end` in the first of them
// on, it is what lies `jump` bytes behind that, the beginning of the streams that are read next.
struct Ahead {
    int64_t usual;
    int64_t farther;
    int64_t jump;
    const char* end;

    int64_t bytes(const char* line) const { return line < end ? usual : usual + jump; }
    int64_t far_bytes(const char* line) const { return farther + bytes(line + farther); }
};

// Where the same place of each of several tiles lies: number t `apart_bytes` behind number t - 1.
struct Places {
    const char* first;
    int64_t apart_bytes;

    const char* of(int t) const { return first + t * apart_bytes; }
    Places behind(int64_t num_bytes) const { return {first + num_bytes, apart_bytes}; }
};

constexpr int8_t INT4_VALUES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr int8_t INT4_RAW_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

template <int KIND>
constexpr bool HAS_BYTES = KIND == HR_INT8 || KIND == HR_FP8;
template <int KIND>
constexpr bool IS_E2M1 = KIND == HR_MXFP4 || KIND == HR_NVFP4;
// For byte products: what makes weights positive, 2 to the power of OFFSET_BITS.
constexpr int8_t E2M1_OFFSET[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
template <int KIND>
constexpr int OFFSET_BITS = KIND == HR_INT8 ? 7 : KIND == HR_INT4 ? 3 : 4;
template <int KIND>
constexpr int INPUTS_PER_LINE = HAS_BYTES<KIND> ? 4 : 8;

template <int I>
struct Number {
    constexpr operator int() const { return I; }
};

// f(0), f(1), ..., f(N - 1), each number a constant.
template <int N, int I = 0, class F>
__attribute__((always_inline)) inline void each(const F& f) {
    if constexpr (I < N) {
        f(Number<I>{});
        each<N, I + 1>(f);
    }
}

#define HR_EACH(name) [&](auto name) __attribute__((always_inline))

// Sizes that the compiler knows make the loops over a group's lines short and straight; 0 and -1
// stand for what only the format says.
// IS_FAR: whether something is asked for into the second-level cache as well.
template <int KIND_, int GROUP_SIZE_, int SCALE_, bool IS_FAR_ = false>
struct Known {
    using Far = Known<KIND_, GROUP_SIZE_, SCALE_, true>;
    static constexpr int KIND = KIND_;
    static constexpr bool IS_FAR = IS_FAR_;
    static constexpr int LINES_AT_ONCE = KIND == HR_NVFP4 ? 2 : 4;

    static int group_size(const PackedFormat& format) {
        return GROUP_SIZE_ ? GROUP_SIZE_ : format.group_size;
    }
    static int scale(const PackedFormat& format) { return SCALE_ >= 0 ? SCALE_ : format.scale; }
};

// The products of one group of T tiles and M rows, as integers; for byte products still with the
// offsets of the weights where there are zero points.
template <class P, class K, int T, int M>
__attribute__((always_inline)) inline void sum_words(
    const typename P::Table& table, const Places& codes, const Ahead& ahead,
    const PackedRow* rows, int64_t group, int group_size, typename P::Int (&found)[T][M][TILE_OUTPUTS / P::LANES]) {
    constexpr int KIND = K::KIND, PARTS = TILE_OUTPUTS / P::LANES;
    const int num_lines = group_size / INPUTS_PER_LINE<KIND>;
    const int16_t* x[M];
    for (int m = 0; m < M; m++) x[m] = rows[m].codes + group * group_size;
    each<T * M * PARTS>(
        HR_EACH(i) { found[i / PARTS / M][i / PARTS % M][i % PARTS] = P::zero_int(); });
    for (int line = 0; line < num_lines; line++) {
        const int64_t ahead_bytes = ahead.bytes(codes.first + line * LINE_BYTES);
        each<T>(HR_EACH(t) {
            const char* at = codes.of(t) + line * LINE_BYTES;
            P::prefetch(at + ahead_bytes);
            each<PARTS>(HR_EACH(v) {
                const char* part = at + v * P::LANES * 4;
                constexpr int PAIRS = HAS_BYTES<KIND> ? 2 : 4;
                constexpr int PAIR[4] = {0, HAS_BYTES<KIND> ? 2 : 4, 2, 6};
                typename P::Words w[PAIRS];
                if constexpr (HAS_BYTES<KIND>)
                    P::decode8(part, w);
                else
                    P::decode4(part, table, w);
                each<M * PAIRS>(HR_EACH(i) {
                    constexpr int m = i / PAIRS, j = i % PAIRS;
                    found[t][m][v] =
                        P::dot(found[t][m][v], w[j], x[m] + line * 2 * PAIRS + PAIR[j]);
                });
            });
        });
    }
}

template <class P, class K, int T, int M>
__attribute__((always_inline)) inline void sum_bytes(
    const typename P::Table& table, const Places& codes, const Ahead& ahead,
    const PackedRow* rows, int64_t group, int group_size, typename P::Int (&found)[T][M][1]) {
    static_assert(P::LANES == TILE_OUTPUTS);
    constexpr int KIND = K::KIND, QUADS = INPUTS_PER_LINE<KIND> / 4;
    const int num_lines = group_size / INPUTS_PER_LINE<KIND>;
    typename P::Int upper[T][M], lower[T][M];
    const int8_t* x[M];
    each<M>(HR_EACH(m) {
        x[m] = reinterpret_cast<const int8_t*>(rows[m].codes + group * group_size);
    });
    each<T * M>(HR_EACH(i) { upper[i / M][i % M] = lower[i / M][i % M] = P::zero_int(); });
    for (int first = 0; first < num_lines; first += K::LINES_AT_ONCE) {
        const Places lines = codes.behind(first * LINE_BYTES);
        const Places asked = lines.behind(ahead.bytes(lines.first));
        const Places far_asked = lines.behind(ahead.far_bytes(lines.first));
        each<K::LINES_AT_ONCE>(HR_EACH(i) {
            const int line = first + i;
            each<T>(HR_EACH(t) {
                const char* at = lines.of(t) + i * LINE_BYTES;
                P::prefetch(asked.of(t) + i * LINE_BYTES);
                if constexpr (K::IS_FAR) P::prefetch_far(far_asked.of(t) + i * LINE_BYTES);
                typename P::Words w[QUADS];
                if constexpr (HAS_BYTES<KIND>)
                    P::decode8(at, w);
                else
                    P::template decode4<IS_E2M1<KIND>>(at, table, w);
                each<M * QUADS>(HR_EACH(n) {
                    constexpr int m = n / QUADS, j = n % QUADS;
                    const int8_t* quad = x[m] + (line * QUADS + j) * 4;
                    upper[t][m] = P::dot(upper[t][m], w[j], quad);
                    lower[t][m] = P::dot(lower[t][m], w[j], quad + group_size);
                });
            });
        });
    }
    each<T * M>(HR_EACH(i) {
        constexpr int t = i / M, m = i % M;
        found[t][m][0] = P::combine(upper[t][m], lower[t][m]);
    });
}

// One group of T tiles and M rows, integers: added to sums.
template <class P, class K, int T, int M>
__attribute__((always_inline)) inline void add_group(
    const PackedProduct& p, const typename P::Table& table, const Places& codes,
    const Places& scales, const Places& zeros, const Ahead& ahead,
    const PackedRow* rows, int64_t group, typename P::Float (&sums)[T][M][TILE_OUTPUTS / P::LANES]) {
    constexpr int PARTS = TILE_OUTPUTS / P::LANES;
    const PackedFormat& format = *p.format;
    typename P::Int found[T][M][PARTS];
    if constexpr (P::HAS_BYTE_PRODUCTS)
        sum_bytes<P, K, T, M>(table, codes, ahead, rows, group, K::group_size(format), found);
    else
        sum_words<P, K, T, M>(table, codes, ahead, rows, group, K::group_size(format), found);
    if (K::KIND == HR_INT4 && format.has_zero_points)
        each<T * M * PARTS>(HR_EACH(i) {
            constexpr int t = i / PARTS / M, m = i / PARTS % M, v = i % PARTS;
            found[t][m][v] =
                P::minus(found[t][m][v], zeros.of(t) + v * P::LANES, rows[m].sums[group]);
        });
    else if constexpr (P::HAS_BYTE_PRODUCTS)
        each<T * M>(HR_EACH(i) {
            constexpr int t = i / M, m = i % M;
            found[t][m][0] =
                P::template less<OFFSET_BITS<K::KIND>>(found[t][m][0], rows[m].sums[group]);
        });
    each<T * PARTS>(HR_EACH(i) {
        constexpr int t = i / PARTS, v = i % PARTS;
        const auto scale =
            P::scale(K::scale(format), scales.of(t) + v * P::LANES * format.scale_bytes);
        each<M>(HR_EACH(m) {
            sums[t][m][v] = P::fma(P::to_float(found[t][m][v]),
                                   P::multiply(scale, rows[m].scales[group]), sums[t][m][v]);
        });
    });
}

// The same for fp8.
template <class P, int T, int M>
__attribute__((always_inline)) inline void add_fp8_group(
    const Places& codes, const Places& scales, const Ahead& ahead,
    const PackedRow* rows, int64_t group, typename P::Float (&sums)[T][M][TILE_OUTPUTS / P::LANES]) {
    constexpr int PARTS = TILE_OUTPUTS / P::LANES, GROUP_SIZE = 128;
    each<PARTS>(HR_EACH(v) {
        typename P::Float found[T][M][4];
        each<T * M * 4>(HR_EACH(i) { found[i / 4 / M][i / 4 % M][i % 4] = P::zero_float(); });
        for (int line = 0; line < GROUP_SIZE / 4; line++) {
            const int64_t ahead_bytes = ahead.bytes(codes.first + line * LINE_BYTES);
            each<T>(HR_EACH(t) {
                const char* at = codes.of(t) + line * LINE_BYTES;
                if (v == 0) P::prefetch(at + ahead_bytes);
                typename P::Float w[4];
                P::decode_fp8(at + v * P::LANES * 4, w);
                each<M * 4>(HR_EACH(i) {
                    constexpr int m = i / 4, j = i % 4;
                    const float* x = rows[m].values + group * GROUP_SIZE + line * 4;
                    found[t][m][j] = P::fma(w[j], x[j], found[t][m][j]);
                });
            });
        }
        each<T>(HR_EACH(t) {
            const auto scale = P::multiply(P::load(scales.of(t) + v * P::LANES * 4), 256.0f);
            each<M>(HR_EACH(m) {
                sums[t][m][v] = P::fma(P::add(P::add(found[t][m][0], found[t][m][1]),
                                              P::add(found[t][m][2], found[t][m][3])),
                                       scale, sums[t][m][v]);
            });
        });
    });
}

// Tiles tile, tile + apart, ... (T of them) of rows row .. row + M. What is read after them lies
// ahead.jump bytes behind their ends.
template <class P, class K, int T, int M>
__attribute__((noinline)) void multiply_tiles(const PackedProduct& p, int tile, int apart, int row,
                                              Ahead ahead) {
    constexpr int KIND = K::KIND, PARTS = TILE_OUTPUTS / P::LANES;
    const PackedFormat& format = *p.format;
    const PackedRow* rows = p.rows + row;
    const auto table = P::table(IS_E2M1<KIND>            ? P::HAS_BYTE_PRODUCTS ? E2M1_OFFSET
                                                                                : E2M1_DOUBLED
                                : format.has_zero_points ? INT4_RAW_VALUES
                                                         : INT4_VALUES);
    typename P::Float sums[T][M][PARTS];
    each<T * M * PARTS>(
        HR_EACH(i) { sums[i / PARTS / M][i / PARTS % M][i % PARTS] = P::zero_float(); });
    const Places start{p.tiles + tile * p.tile_bytes, apart * p.tile_bytes};
    if (format.header_bytes)
        for (int t = 0; t < T; t++) P::prefetch(start.of(t));
    ahead.end = start.first + p.tile_bytes - ahead.usual;
    const int group_scale_bytes = TILE_OUTPUTS * format.scale_bytes;
    const int zeros_offset = format.groups_per_record * group_scale_bytes;
    Places record = start.behind(format.header_bytes);
    for (int64_t first = 0; first < p.num_groups; first += format.groups_per_record) {
        const int64_t left = p.num_groups - first;
        const int count = int(left < format.groups_per_record ? left : format.groups_per_record);
        const Places asked = record.behind(ahead.bytes(record.first));
        const Places far_asked = record.behind(ahead.far_bytes(record.first));
        for (int t = 0; t < T; t++)
            for (int at = 0; at < format.record_scale_bytes; at += LINE_BYTES) {
                P::prefetch(asked.of(t) + at);
                if constexpr (K::IS_FAR) P::prefetch_far(far_asked.of(t) + at);
            }
        for (int i = 0; i < count; i++) {
            const Places codes =
                record.behind(format.record_scale_bytes + i * format.group_code_bytes);
            const Places scales = record.behind(i * group_scale_bytes);
            const Places zeros = record.behind(zeros_offset + i * TILE_OUTPUTS);
            if constexpr (KIND == HR_FP8)
                add_fp8_group<P, T, M>(codes, scales, ahead, rows, first + i, sums);
            else
                add_group<P, K, T, M>(p, table, codes, scales, zeros, ahead, rows, first + i,
                                      sums);
        }
        record = record.behind(format.record_scale_bytes + count * format.group_code_bytes);
    }
    each<T * M * PARTS>(HR_EACH(i) {
        constexpr int t = i / PARTS / M, m = i / PARTS % M, v = i % PARTS;
        auto sum = sums[t][m][v];
        if constexpr (KIND == HR_MXFP4) sum = P::multiply(sum, 0.5f);
        if constexpr (KIND == HR_NVFP4)
            sum = P::multiply(sum, P::multiply(P::load(start.of(t) + v * P::LANES * 4), 0.5f));
        P::store(p.out + (row + m) * p.out_stride + (tile + t * apart) * TILE_OUTPUTS +
                     v * P::LANES,
                 sum);
    });
}

// Rows from `row` on, M at once while there are as many, of `num_tiles` tiles that lie `apart`; T
// tiles are read side by side, as many as there are registers for the sums of, but at most
// MOST_STREAMS.
template <class P, class K, int TILES, int MOST_STREAMS, int M>
int multiply_rows(const PackedProduct& p, int tile, int num_tiles, int apart, int row,
                  const Ahead& ahead) {
    constexpr int MOST = TILES > M ? TILES / M : 1, T = MOST < MOST_STREAMS ? MOST : MOST_STREAMS;
    for (; row + M <= p.num_rows; row += M) {
        int t = 0;
        for (; t + T <= num_tiles; t += T)
            multiply_tiles<P, K, T, M>(p, tile + t * apart, apart, row, ahead);
        for (; t < num_tiles; t++) multiply_tiles<P, K, 1, M>(p, tile + t * apart, 0, row, ahead);
    }
    return row;
}

template <class P, class K, int MOST_STREAMS>
void multiply_streams(const PackedProduct& p, int64_t ahead_bytes, int64_t farther_bytes) {
    constexpr bool IS_FLOAT = K::KIND == HR_FP8;
    constexpr int ROWS = K::IS_FAR ? AHEAD_ROWS : IS_FLOAT ? P::FLOAT_ROWS : P::ROWS;
    constexpr int TILES = IS_FLOAT ? P::FLOAT_TILES : P::TILES;
    constexpr int STREAMS = TILES < MOST_STREAMS ? TILES : MOST_STREAMS;
    const auto multiply = [&](int tile, int num_tiles, int apart, int64_t jump) {
        const Ahead ahead{ahead_bytes, farther_bytes, jump, nullptr};
        int row = multiply_rows<P, K, TILES, STREAMS, ROWS>(p, tile, num_tiles, apart, 0, ahead);
        if constexpr (ROWS > 4)
            row = multiply_rows<P, K, TILES, STREAMS, 4>(p, tile, num_tiles, apart, row, ahead);
        if constexpr (ROWS > 2)
            row = multiply_rows<P, K, TILES, STREAMS, 2>(p, tile, num_tiles, apart, row, ahead);
        multiply_rows<P, K, TILES, STREAMS, 1>(p, tile, num_tiles, apart, row, ahead);
    };
    // STREAMS streams, each through a stretch of adjacent tiles: what is asked for ahead beyond the
    // end of a tile is then always wanted next.
    // What the thread reads next begins in as many streams; if those are as far apart as these are,
    // every one of them lies equally far behind one that ends.
    const int apart = p.num_tiles / STREAMS;
    const int64_t stream_bytes = apart * p.tile_bytes;
    const bool is_alike = p.next.count / STREAMS * p.next.tile_bytes == stream_bytes;
    const int64_t jump = is_alike ? p.next.begin - (p.tiles + stream_bytes) : 0;
    for (int tile = 0; tile < apart; tile++)
        multiply(tile, STREAMS, apart, tile + 1 < apart ? 0 : jump);
    for (int tile = apart * STREAMS; tile < p.num_tiles; tile++) multiply(tile, 1, 1, 0);
}

template <class P, class K, class Reading>
void multiply_known(const PackedProduct& p) {
    if (p.num_rows > AHEAD_ROWS)
        multiply_streams<P, K, Reading::STREAMS>(p, PACKED_PREFETCH_BYTES, 0);
    else if constexpr (Reading::FARTHER_BYTES > 0 && K::KIND != HR_FP8)
        multiply_streams<P, typename K::Far, Reading::STREAMS>(p, Reading::AHEAD_BYTES,
                                                               Reading::FARTHER_BYTES);
    else
        multiply_streams<P, K, Reading::STREAMS>(p, Reading::AHEAD_BYTES, 0);
}

// How a processor likes to read one row's weights: in so many streams at most, asking for so much of
// each ahead and for what lies farther, if anything does, into the second-level cache.
struct UsualReading {
    static constexpr int STREAMS = 8, AHEAD_BYTES = PACKED_PREFETCH_BYTES, FARTHER_BYTES = 0;
};

template <class P, int KIND, class Reading = UsualReading>
void multiply_packed(const PackedProduct& p) {
    constexpr int GROUP_SIZE =
        KIND == HR_MXFP4 ? 32 : KIND == HR_NVFP4 ? 16 : KIND == HR_FP8 ? 128 : 0;
    constexpr int SCALE = KIND == HR_MXFP4 ? HR_SCALE_E8M0 : KIND == HR_NVFP4 ? HR_SCALE_E4M3 : -1;
    if constexpr (P::KNOWS_SIZES && GROUP_SIZE == 0) {
        const PackedFormat& format = *p.format;
        if (format.scale == HR_SCALE_FLOAT16) {
            if (format.group_size == 128)
                return multiply_known<P, Known<KIND, 128, HR_SCALE_FLOAT16>, Reading>(p);
            if (format.group_size == 32)
                return multiply_known<P, Known<KIND, 32, HR_SCALE_FLOAT16>, Reading>(p);
        }
    }
    multiply_known<P, Known<KIND, GROUP_SIZE, SCALE>, Reading>(p);
}

// The product in passes of at most so many rows.
template <class F>
void in_passes(const PackedProduct& p, int most_rows, const F& multiply) {
    PackedProduct some = p;
    for (int done = 0; done < p.num_rows; done += some.num_rows) {
        const int left = p.num_rows - done;
        some.rows = p.rows + done;
        some.num_rows = left < most_rows ? left : most_rows;
        some.out = p.out + done * p.out_stride;
        multiply(some);
    }
}

template <class P>
constexpr PackedKernels packed_of() {
    return {{multiply_packed<P, HR_INT8>, multiply_packed<P, HR_INT4>,
             multiply_packed<P, HR_MXFP4>, multiply_packed<P, HR_NVFP4>,
             multiply_packed<P, HR_FP8>},
            quantise_packed<P::HAS_BYTE_PRODUCTS>};
}

}  // namespace
