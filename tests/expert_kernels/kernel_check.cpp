// Runs experts of odd shapes with every instruction set there is and compares the bits with those
// of the scalar kernels; where a set adds in an order of its own, with itself on one thread, and
// the numbers with the scalar ones. Prints the names of the sets; ends with 1 at the first difference.
// A program of its own, so that an emulator of another processor can run it.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "experts.h"
#include "packed.h"

namespace {

struct Shape {
    int hidden, intermediate, has_bias, is_transposed, is_interleaved, gate, rows;
};

constexpr Shape SHAPES[] = {
    {1, 1, 0, 0, 0, HR_ACT, 1},
    {48, 40, 0, 0, 0, HR_ACT_MUL, 1},
    {37, 21, 1, 0, 1, HR_ALPHA_SWIGLU, 13},
    {131, 67, 1, 0, 0, HR_CLAMPED_ACT_MUL, 3},
    {37, 21, 1, 1, 1, HR_ALPHA_SWIGLU, 7},
    {300, 75, 0, 1, 0, HR_ACT_MUL, 2},
    {530, 420, 0, 0, 0, HR_ACT_MUL, 5},
    {290, 150, 0, 0, 0, HR_ACT_MUL, 35},
    {2070, 20, 0, 0, 0, HR_ACT_MUL, 13},
};

// The tables of expert_store/formats.py for quantised weights; rows and biases are bfloat16 there.
struct Packing {
    int kind, scale, group_size, has_zero_points;
};

constexpr Packing PACKINGS[] = {
    {HR_INT8, HR_SCALE_FLOAT16, 128, 0}, {HR_INT8, HR_SCALE_FLOAT32, 32, 0},
    {HR_INT4, HR_SCALE_FLOAT16, 32, 0},  {HR_INT4, HR_SCALE_BFLOAT16, 64, 1},
    {HR_MXFP4, HR_SCALE_E8M0, 32, 0},    {HR_NVFP4, HR_SCALE_E4M3, 16, 0},
    {HR_FP8, HR_SCALE_FLOAT32, 128, 0},
};

// More than a matrix takes in any format: whole tiles and groups, a byte a code, scales and zero
// points. Not much more: every byte is made at random, and an emulator takes its time over that.
int64_t matrix_bytes(int64_t num_outputs, int64_t num_inputs) {
    return (num_outputs + 31) / 16 * 16 * 2 * ((num_inputs + 127) / 128 * 128 + 128);
}

std::vector<float> run(const Shape& shape, const Packing* packing, int dtype, int isa,
                       int num_threads) {
    const int item = dtype == HR_FLOAT32 ? 4 : 2;
    const int has_gate = shape.gate != HR_ACT;
    const int64_t up_rows = int64_t(shape.intermediate) * (has_gate ? 2 : 1);
    HrForm form{};
    form.hidden_size = shape.hidden;
    form.intermediate_size = shape.intermediate;
    form.dtype = dtype;
    form.gate = shape.gate;
    form.activation = HR_SILU;
    form.has_gate = has_gate;
    form.has_bias = shape.has_bias;
    form.is_transposed = shape.is_transposed;
    form.is_interleaved = shape.is_interleaved;
    form.alpha = 1.7f;
    form.limit = 0.5f;
    if (packing) {
        form.kind = packing->kind;
        form.scale = packing->scale;
        form.group_size = packing->group_size;
        form.has_zero_points = packing->has_zero_points;
        form.is_transposed = form.is_interleaved = 0;
    }
    int64_t end = 0;
    const auto place = [&end, item](int64_t count) {
        const int64_t begin = end;
        end = (begin + count * item + 63) / 64 * 64;
        return begin;
    };
    form.first_offset =
        place(packing ? matrix_bytes(up_rows + 16, shape.hidden) : up_rows * shape.hidden);
    form.down_offset = place(packing ? matrix_bytes(shape.hidden, shape.intermediate)
                                     : int64_t(shape.hidden) * shape.intermediate);
    form.first_bias_offset = place(up_rows);
    form.down_bias_offset = place(shape.hidden);

    std::minstd_rand engine(7);
    const auto random = [&engine] { return uint32_t(engine()) << 8 ^ uint32_t(engine()); };
    const auto fill = [&random, dtype](std::vector<char>& bytes) {
        for (size_t at = 0; at + 4 <= bytes.size(); at += dtype == HR_FLOAT32 ? 4 : 2) {
            // Sign and fraction at random, magnitudes from 2^-5 to 2^-2.
            if (dtype == HR_FLOAT32) {
                const uint32_t bits = (random() & 0x807fffff) | (122 + random() % 4) << 23;
                memcpy(&bytes[at], &bits, 4);
            } else {
                const int shift = dtype == HR_BFLOAT16 ? 7 : 10;
                const int bias = dtype == HR_BFLOAT16 ? 122 : 10;
                const uint32_t fraction = random() & (0x8000u | ((1u << shift) - 1));
                const uint16_t bits = uint16_t(fraction | (bias + random() % 4) << shift);
                memcpy(&bytes[at], &bits, 2);
            }
        }
    };
    std::vector<char> block(size_t(end) + 64), hidden(size_t(shape.rows) * shape.hidden * item + 4);
    fill(block);
    fill(hidden);
    std::vector<float> places(size_t(shape.rows) * shape.hidden);
    std::vector<int64_t> ids;
    for (int64_t row = 0; row < shape.rows; row++) ids.push_back(row);
    const void* blocks[] = {block.data()};
    const int64_t pair_begin[] = {0, shape.rows};
    const HrStep step{1,          blocks,        pair_begin,   ids.data(),
                      ids.data(), hidden.data(), places.data()};
    HrPool* pool = hr_pool_create(num_threads, 20);
    const int code = hr_run(pool, &form, isa, &step);
    hr_pool_destroy(pool);
    if (code) places.clear();
    return places;
}

bool is_equal(const Shape& shape, const Packing* packing, int dtype, int isa,
              const std::vector<float>& expected) {
    const auto found = run(shape, packing, dtype, isa, 3);
    bool is_zero = expected.size() > 1;  // one code alone may well be 0
    for (const float value : expected) is_zero &= value == 0;
    if (!expected.empty() && !is_zero &&
        !memcmp(found.data(), expected.data(), expected.size() * sizeof(float)))
        return true;
    std::printf("%s differs: %d x %d, dtype %d, kind %d\n", hr_isa_name(isa), shape.hidden,
                shape.intermediate, dtype, packing ? packing->kind : 0);
    return false;
}

// bfloat16, and fp8 with rows of it, where there are instructions for its products.
bool adds_in_its_own_order(const Shape& shape, const Packing* packing, int dtype, int isa) {
    return (packing ? packing->kind == HR_FP8 : !shape.is_transposed) && dtype == HR_BFLOAT16 &&
           (!std::strcmp(hr_isa_name(isa), "avx512_bf16") || !std::strcmp(hr_isa_name(isa), "amx"));
}

// Within two roundings of the largest; a NaN is not.
bool is_near(const std::vector<float>& found, const std::vector<float>& expected) {
    float most = 0;
    for (const float value : expected) most = std::fmax(most, std::fabs(value));
    for (size_t i = 0; i < expected.size(); i++)
        if (!(std::fabs(found[i] - expected[i]) <= most / 64)) return false;
    return found.size() == expected.size();
}

#if defined(HR_HAS_X86)
// The AVX-512 kernels that read many tiles side by side and those that read two: a processor uses
// one of them, so their bits are compared here.
bool do_streams_agree(const Packing& packing) {
    constexpr int NUM_TILES = 21, NUM_GROUPS = 5, NUM_ROWS = 15;  // 8, 4, 2 and 1 at once
    HrForm form{};
    form.kind = packing.kind;
    form.scale = packing.scale;
    form.group_size = packing.group_size;
    form.has_zero_points = packing.has_zero_points;
    PackedFormat format;
    if (!find_packed_format(form, format)) return false;
    std::minstd_rand engine(9);
    const size_t depth = size_t(NUM_GROUPS * format.group_size);
    PackedProduct product{};
    product.format = &format;
    product.tile_bytes = packed_tile_bytes(format, int64_t(depth));
    product.num_tiles = NUM_TILES;
    product.num_groups = NUM_GROUPS;
    product.num_rows = NUM_ROWS;
    product.out_stride = NUM_TILES * TILE_OUTPUTS;
    // Bytes that are moderate numbers in every format of scales.
    std::vector<char> tiles(size_t(NUM_TILES * product.tile_bytes));
    for (char& byte : tiles) byte = char(0x30 + engine() % 16);
    std::vector<float> values(NUM_ROWS * depth), scales(NUM_ROWS * NUM_GROUPS);
    for (float& value : values) value = float(engine() % 2001) / 1000 - 1;
    std::vector<int16_t> codes(values.size());
    std::vector<int32_t> sums(scales.size());
    std::vector<PackedRow> rows;
    for (size_t row = 0; row < NUM_ROWS; row++) {
        const size_t at = row * depth, group = row * NUM_GROUPS;
        quantise_row(avx512_packed, format, &values[at], NUM_GROUPS, &codes[at], &scales[group],
                     &sums[group]);
        rows.push_back({&codes[at], &scales[group], &sums[group], &values[at]});
    }
    product.tiles = tiles.data();
    product.rows = rows.data();
    std::vector<float> found[2];
    const PackedKernels* both[] = {&avx512_packed, &avx512_amd_packed};
    for (int i = 0; i < 2; i++) {
        found[i].resize(size_t(NUM_ROWS * product.out_stride));
        product.out = found[i].data();
        both[i]->multiply[form.kind - 1](product);
    }
    bool is_zero = true;
    for (const float value : found[0]) is_zero &= value == 0;
    return !is_zero && found[0] == found[1];
}
#endif

}  // namespace

int main() {
    std::vector<std::vector<float>> expected;  // the scalar kernels', made once
    for (int isa = 0; hr_isa_name(isa); isa++) {
        size_t at = 0;
        const auto check = [&](const Shape& shape, const Packing* packing, int dtype) {
            if (isa == 0) expected.push_back(run(shape, packing, dtype, 0, 1));
            if (adds_in_its_own_order(shape, packing, dtype, isa)) {
                const auto found = run(shape, packing, dtype, isa, 1);
                return is_near(found, expected[at++]) &&
                       is_equal(shape, packing, dtype, isa, found);
            }
            return is_equal(shape, packing, dtype, isa, expected[at++]);
        };
        for (const Shape& shape : SHAPES) {
            for (int dtype = HR_FLOAT32; dtype <= HR_FLOAT16; dtype++)
                if (!check(shape, nullptr, dtype)) return 1;
            for (const Packing& packing : PACKINGS)
                if (!check(shape, &packing, HR_BFLOAT16)) return 1;
        }
#if defined(HR_HAS_X86)
        if (!std::strcmp(hr_isa_name(isa), "avx512_vnni"))
            for (const Packing& packing : PACKINGS)
                if (!do_streams_agree(packing)) {
                    std::printf("streams differ: kind %d\n", packing.kind);
                    return 1;
                }
#endif
        std::printf("%s\n", hr_isa_name(isa));
    }
}
