// Before an instruction set is used at all: does it give the scalar kernels' bits on this machine?
// A compiler, an emulator or a processor that gets it wrong must cost speed, never a token. Kernels
// that add in an order of their own are to give nearly the scalar numbers.

#include <cstdint>
#include <cstring>
#include <vector>

#include "experts.h"
#include "gates.h"
#include "kernels.h"
#include "packed.h"

namespace {

// Rows that kernels take several of at once, and fewer, for which they go other ways.
constexpr int NUM_ROWS = 13, SOME_ROWS = 8, FEW_ROWS = 3;
constexpr int NUM_OUTPUTS = 37, DEPTH = 53, PADDED_DEPTH = 64;

// Numbers of the dtype with any sign and fraction and magnitudes around 1.
void fill(std::vector<char>& bytes, int dtype, uint32_t state) {
    for (size_t at = 0; at + 4 <= bytes.size(); at += dtype == HR_FLOAT32 ? 4 : 2) {
        state = state * 1664525u + 1013904223u;
        const uint32_t random = state >> 8;
        if (dtype == HR_FLOAT32) {
            const uint32_t bits = (random << 8 & 0x80000000) | (124 + random % 5) << 23 |
                                  (random * 2654435761u >> 9);
            memcpy(&bytes[at], &bits, 4);
        } else {
            const int fraction_bits = dtype == HR_BFLOAT16 ? 7 : 10;
            const uint32_t exponent = (dtype == HR_BFLOAT16 ? 124 : 12) + random % 5;
            const uint16_t bits = uint16_t((random & 0x8000) | exponent << fraction_bits |
                                           (random >> 3 & ((1u << fraction_bits) - 1)));
            memcpy(&bytes[at], &bits, 2);
        }
    }
}

// The same bits, or no number in both.
bool are_equal(const float* one, const float* other, size_t count) {
    for (size_t i = 0; i < count; i++) {
        const bool is_number = one[i] == one[i];
        if (is_number ? memcmp(one + i, other + i, sizeof(float)) != 0 : other[i] == other[i])
            return false;
    }
    return true;
}

}  // namespace

bool has_scalar_bits(const Kernels& kernels) {
    std::vector<char> values(size_t(NUM_ROWS) * PADDED_DEPTH * sizeof(float) + 4);
    fill(values, HR_FLOAT32, 1);
    std::vector<float> rows(size_t(NUM_ROWS) * PADDED_DEPTH);
    memcpy(rows.data(), values.data(), rows.size() * sizeof(float));
    const float* x[NUM_ROWS];
    for (int m = 0; m < NUM_ROWS; m++) {
        x[m] = &rows[size_t(m) * PADDED_DEPTH];
        memset(&rows[size_t(m) * PADDED_DEPTH + DEPTH], 0, (PADDED_DEPTH - DEPTH) * sizeof(float));
    }
    for (int dtype = HR_FLOAT32; dtype <= HR_FLOAT16; dtype++) {
        const int item = dtype == HR_FLOAT32 ? 4 : 2;
        std::vector<char> weights(size_t(NUM_OUTPUTS) * DEPTH * item + 64);
        fill(weights, dtype, 2);
        for (int is_columns = 0; is_columns < 2; is_columns++) {
            std::vector<float> found[2];
            const Kernels* both[] = {&scalar_kernels, &kernels};
            for (int i = 0; i < 2; i++) {
                found[i].resize(size_t(NUM_ROWS + SOME_ROWS + FEW_ROWS + 1) * NUM_OUTPUTS);
                Product product{};
                product.weights = weights.data();
                product.stride_bytes = (is_columns ? NUM_OUTPUTS : DEPTH) * item;
                product.num_outputs = NUM_OUTPUTS;
                product.depth = DEPTH;
                product.x = x;
                product.out = found[i].data();
                product.out_stride = NUM_OUTPUTS;
                const auto multiply =
                    (is_columns ? both[i]->sum_columns : both[i]->dot_rows)[dtype];
                for (const int num_rows : {NUM_ROWS, SOME_ROWS, FEW_ROWS, 1}) {
                    product.num_rows = num_rows;
                    multiply(product);
                    product.out += num_rows * NUM_OUTPUTS;
                }
            }
            if (memcmp(found[0].data(), found[1].data(), found[0].size() * sizeof(float)))
                return false;
        }
    }
    return true;
}

bool is_near_scalar(const LaidKernels& kernels) {
    constexpr int ROWS = 19, LAID_DEPTH = 64, LINE_BYTES = 64;  // a whole block and another
    std::vector<char> weights(size_t(NUM_OUTPUTS) * DEPTH * 2 + 64), values(ROWS * DEPTH * 2 + 64);
    fill(weights, HR_BFLOAT16, 7);
    fill(values, HR_BFLOAT16, 8);
    std::vector<float> widened(ROWS * PADDED_DEPTH), expected(ROWS * NUM_OUTPUTS);
    std::vector<float> found(expected.size()), alone(expected.size());
    const char* rows[ROWS];
    const float* x[ROWS];
    for (int m = 0; m < ROWS; m++) {
        rows[m] = &values[size_t(m) * DEPTH * 2];
        x[m] = &widened[size_t(m) * PADDED_DEPTH];
        for (int k = 0; k < DEPTH; k++)
            memcpy(reinterpret_cast<char*>(&widened[size_t(m * PADDED_DEPTH + k)]) + 2,
                   rows[m] + k * 2, 2);
    }
    Product exact{};
    exact.weights = weights.data();
    exact.stride_bytes = DEPTH * 2;
    exact.num_outputs = NUM_OUTPUTS;
    exact.depth = DEPTH;
    exact.x = x;
    exact.num_rows = ROWS;
    exact.out = expected.data();
    exact.out_stride = NUM_OUTPUTS;
    scalar_kernels.dot_rows[HR_BFLOAT16](exact);
    std::vector<uint16_t> laid(2 * ROWS * LAID_DEPTH + LINE_BYTES);
    const uintptr_t at = reinterpret_cast<uintptr_t>(laid.data());
    uint16_t* to = laid.data() + (LINE_BYTES - at % LINE_BYTES) / 2;
    kernels.lay(rows, ROWS, 0, DEPTH, LAID_DEPTH, LAID_DEPTH, to);
    LaidProduct product{weights.data(), DEPTH * 2, NUM_OUTPUTS,  DEPTH,
                        to,             ROWS,      found.data(), NUM_OUTPUTS, nullptr};
    kernels.multiply(product);
    for (int m = 0; m < ROWS; m++) {
        kernels.lay(rows + m, 1, 0, DEPTH, LAID_DEPTH, LAID_DEPTH, to + ROWS * LAID_DEPTH);
        product.x = to + ROWS * LAID_DEPTH;
        product.num_rows = 1;
        product.out = &alone[size_t(m) * NUM_OUTPUTS];
        kernels.multiply(product);
    }
    for (size_t i = 0; i < found.size(); i++) {
        // All magnitudes are below 4: 53 products of at most 16, and their sums' roundings.
        const float apart = found[i] - expected[i];
        if (!(apart < 1e-3f && apart > -1e-3f)) return false;
    }
    return !memcmp(found.data(), alone.data(), found.size() * sizeof(float));
}

namespace {

bool has_scalar_bits(const PackedKernels& kernels, const HrForm& form) {
    PackedFormat format;
    if (!find_packed_format(form, format)) return false;
    constexpr int NUM_TILES = 3, PACKED_ROWS = 15;
    const int num_groups = format.groups_per_record + 1, depth = num_groups * format.group_size;
    const int64_t tile_bytes = packed_tile_bytes(format, depth);
    std::vector<char> tiles(size_t(NUM_TILES * tile_bytes));
    fill(tiles, HR_BFLOAT16, 3);  // as scales: any positive or negative numbers of moderate size
    std::vector<char> random(size_t(PACKED_ROWS) * depth * sizeof(float) + 4);
    fill(random, HR_FLOAT32, 4);
    std::vector<float> values(size_t(PACKED_ROWS) * depth);
    memcpy(values.data(), random.data(), values.size() * sizeof(float));
    // A group with a value that is no number, and one of zeros.
    values[1] = __builtin_nanf("");
    memset(&values[size_t(depth)], 0, size_t(format.group_size) * sizeof(float));
    std::vector<float> found[2];
    const PackedKernels* both[] = {&scalar_packed, &kernels};
    for (int i = 0; i < 2; i++) {
        std::vector<int16_t> codes(values.size());
        std::vector<float> scales(size_t(PACKED_ROWS * num_groups));
        std::vector<int32_t> sums(size_t(PACKED_ROWS * num_groups));
        std::vector<PackedRow> rows(PACKED_ROWS);
        for (int m = 0; m < PACKED_ROWS; m++) {
            const size_t at = size_t(m) * depth, group = size_t(m) * num_groups;
            both[i]->quantise(&values[at], num_groups, format.group_size, &codes[at],
                              &scales[group], &sums[group]);
            rows[size_t(m)] = {&codes[at], &scales[group], &sums[group], &values[at]};
        }
        found[i].resize(size_t(PACKED_ROWS) * NUM_TILES * TILE_OUTPUTS * 2);
        PackedProduct product{};
        product.format = &format;
        product.tiles = tiles.data();
        product.tile_bytes = tile_bytes;
        product.num_tiles = NUM_TILES;
        product.num_groups = num_groups;
        product.out_stride = NUM_TILES * TILE_OUTPUTS;
        product.rows = rows.data();
        product.num_rows = PACKED_ROWS;
        product.out = found[i].data();
        both[i]->multiply[form.kind - 1](product);
        product.rows = rows.data() + 2;
        product.num_rows = 1;
        product.out += found[i].size() / 2;
        both[i]->multiply[form.kind - 1](product);
    }
    return are_equal(found[0].data(), found[1].data(), found[0].size());
}

}  // namespace

bool has_scalar_bits(const PackedKernels& kernels) {
    HrForm form{};
    const auto is_equal = [&](int kind, int scale, int group_size, int has_zero_points) {
        form.kind = kind;
        form.scale = scale;
        form.group_size = group_size;
        form.has_zero_points = has_zero_points;
        return has_scalar_bits(kernels, form);
    };
    for (int scale = HR_SCALE_FLOAT32; scale <= HR_SCALE_BFLOAT16; scale++)
        if (!is_equal(HR_INT8, scale, 64, 0) || !is_equal(HR_INT4, scale, 32, 0) ||
            !is_equal(HR_INT4, scale, 32, 1))
            return false;
    return is_equal(HR_MXFP4, HR_SCALE_E8M0, 32, 0) && is_equal(HR_NVFP4, HR_SCALE_E4M3, 16, 0) &&
           is_equal(HR_FP8, HR_SCALE_FLOAT32, 128, 0);
}

bool is_near_scalar(const PairKernels& kernels) {
    HrForm form{};
    form.kind = HR_FP8;
    form.group_size = 128;
    PackedFormat format;
    if (!find_packed_format(form, format)) return false;
    // Tiles: four side by side, two, one; rows: a block of them, several.
    constexpr int NUM_TILES = 7, NUM_GROUPS = 2, NUM_ROWS = 19, DEPTH = NUM_GROUPS * 128;
    const int64_t tile_bytes = packed_tile_bytes(format, DEPTH);
    std::vector<char> tiles(size_t(NUM_TILES * tile_bytes));
    fill(tiles, HR_FLOAT32, 9);  // scales of such magnitudes, and codes that are any numbers
    for (size_t at = 0; at < tiles.size(); at++)
        if ((tiles[at] & 0x7f) == 0x7f) tiles[at] = 0;
    std::vector<char> halves(NUM_ROWS * DEPTH * 2);
    fill(halves, HR_BFLOAT16, 10);
    std::vector<float> values(NUM_ROWS * DEPTH);
    std::vector<int16_t> codes(values.size());
    std::vector<PackedRow> rows;
    for (size_t i = 0; i < values.size(); i++)
        memcpy(reinterpret_cast<char*>(&values[i]) + 2, &halves[i * 2], 2);
    for (size_t at = 0; at < values.size(); at += DEPTH) {
        kernels.lay(&values[at], DEPTH, &codes[at]);
        rows.push_back({&codes[at], nullptr, nullptr, &values[at]});
    }
    std::vector<float> expected(NUM_ROWS * NUM_TILES * TILE_OUTPUTS), found(expected.size());
    std::vector<float> alone(expected.size());
    PackedProduct product{};
    product.format = &format;
    product.tiles = tiles.data();
    product.tile_bytes = tile_bytes;
    product.num_tiles = NUM_TILES;
    product.num_groups = NUM_GROUPS;
    product.out_stride = NUM_TILES * TILE_OUTPUTS;
    product.rows = rows.data();
    product.num_rows = NUM_ROWS;
    product.out = expected.data();
    scalar_packed.multiply[HR_FP8 - 1](product);
    product.out = found.data();
    kernels.multiply(product);
    product.num_rows = 1;
    for (int m = 0; m < NUM_ROWS; m++, product.rows++) {
        product.out = &alone[size_t(m * product.out_stride)];
        kernels.multiply(product);
    }
    float most = 0;
    for (const float value : expected) most = value > most ? value : most;
    for (size_t i = 0; i < found.size(); i++) {
        const float apart = found[i] - expected[i];
        if (!(apart <= most * 1e-5f && apart >= most * -1e-5f)) return false;
    }
    return most > 0 && !memcmp(found.data(), alone.data(), found.size() * sizeof(float));
}

bool has_scalar_bits(const Gates& gates) {
    constexpr int COUNT = 75;  // no multiple of what a loop does at once
    std::vector<char> sums(2 * COUNT * sizeof(float)), biases(2 * COUNT * sizeof(float));
    fill(sums, HR_FLOAT32, 5);
    const float infinity = __builtin_inff(), none = __builtin_nanf("");
    memcpy(&sums[0], &infinity, sizeof(float));
    memcpy(&sums[4], &none, sizeof(float));
    HrForm form{};
    form.has_gate = 1;
    form.activation = HR_SILU;
    form.alpha = 1.7f;
    form.limit = 0.9f;
    for (form.dtype = HR_FLOAT32; form.dtype <= HR_FLOAT16; form.dtype++)
        for (form.gate = HR_ACT_MUL; form.gate <= HR_ALPHA_SWIGLU; form.gate++) {
            fill(biases, form.dtype, 6);
            float found[2][3][COUNT];
            const Gates* both[] = {&scalar_gates, &gates};
            for (int i = 0; i < 2; i++) {
                GateRow row{};
                row.sums = reinterpret_cast<const float*>(sums.data());
                row.up_begin = row.bias_up_begin = COUNT;
                row.step = 1;
                row.bias = form.gate == HR_ACT_MUL ? nullptr : biases.data();
                row.out = found[i][0];
                row.count = COUNT;
                both[i]->apply_gate(form, row);
                both[i]->finish_row(form, row.sums, row.bias, found[i][1], COUNT);
                both[i]->widen_row(form.dtype, biases.data(), found[i][2], COUNT);
            }
            if (!are_equal(found[0][0], found[1][0], 3 * COUNT)) return false;
        }
    return true;
}
