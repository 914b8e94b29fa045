// Products of quantised weights, stored in tiles (docs/expert-formats.md), with rows of values.
//
// **The order of additions is the contract**, as in kernels.h: it depends on the weights' shape and
// format alone. Every output has sums of its own; none ever crosses outputs.
//
//   int8, int4,     The row is quantised to 16-bit integers, group by group: the greatest magnitude
//   mxfp4, nvfp4    becomes MAX_CODE, in scale x. The codes' values are small integers too (e2m1
//                   doubled), so the product of a group is an integer, exact in 32 bits, less
//                   zero point times the sum of the row's codes where there are zero points. Then
//                       sum = fma(float(integer), weight scale * x scale, sum)
//                   for ascending groups, and at last sum * 0.5 (e2m1), * output scale (nvfp4).
//   fp8             Four sums per group, input k goes to sum k % 4, ascending, one fused
//                   multiply-add each with the weight / 256 (exact); then
//                       sum = fma((s0 + s1) + (s2 + s3), scale * 256, sum)
//                   Experts with rows of bfloat16 have bits of their own where the processor
//                   multiplies pairs of such numbers: see PairKernels.
#pragma once

#include <cstdint>

#include "experts.h"

constexpr int TILE_OUTPUTS = 16;
constexpr int LINE_BYTES = 64;

// 127 * 256 + 127: the greatest that two signed bytes of place values 256 and 1 both hold with
// either sign. 127 * MAX_CODE * 128 inputs, the largest product of a group, is below 2^31.
constexpr int MAX_CODE = 32639;
// Groups whose greatest magnitude is below this count as zeros: its inverse would not be finite.
constexpr float LEAST_MAGNITUDE = 1e-30f;

struct PackedFormat {
    int32_t kind;  // HrKind, not HR_PLAIN
    int32_t scale;
    int32_t group_size;
    int32_t has_zero_points;
    int32_t scale_bytes;
    int32_t groups_per_record;
    int32_t record_scale_bytes;
    int32_t group_code_bytes;
    int32_t header_bytes;
};

// False when that is no format.
bool find_packed_format(const HrForm& form, PackedFormat& format);

int64_t packed_groups(const PackedFormat& format, int64_t depth);
int64_t packed_tile_bytes(const PackedFormat& format, int64_t depth);

// A row as the kernels take it. codes: groups * group_size of 16 bits, ordered within each group as
// the instruction set likes it (packed_template.h). values: for fp8 alone, instead of codes;
// groups * group_size too, zeros beyond the row's end. PairKernels take codes alone.
struct PackedRow {
    const int16_t* codes;
    const float* scales;  // per group; for e4m3 scales, which kernels take / 256, times 256
    const int32_t* sums;  // per group: of its codes
    const float* values;
};

// Tiles that lie one after the other.
struct PackedTiles {
    const char* begin;
    int64_t tile_bytes;
    int32_t count;
};

// Result (m, tile, output) goes to out[m * out_stride + tile * TILE_OUTPUTS + output].
struct PackedProduct {
    const PackedFormat* format;
    const char* tiles;
    int64_t tile_bytes;
    int32_t num_tiles;
    int32_t num_groups;
    const PackedRow* rows;
    int32_t num_rows;
    float* out;
    int64_t out_stride;
    // What the same thread reads afterwards, if it is known: its first lines are asked for while the
    // last of these are multiplied.
    PackedTiles next;
};

struct PackedKernels {
    // by HrKind - 1
    void (*multiply[5])(const PackedProduct&);
    // Quantises num_groups * group_size values (zeros beyond the row's end) to what PackedRow holds.
    void (*quantise)(const float* values, int64_t num_groups, int32_t group_size, int16_t* codes,
                     float* scales, int32_t* sums);
};

// A row as PackedRow describes it, for weights of that format: what callers of `multiply` use.
inline void quantise_row(const PackedKernels& kernels, const PackedFormat& format,
                         const float* values, int64_t num_groups, int16_t* codes, float* scales,
                         int32_t* sums) {
    kernels.quantise(values, num_groups, format.group_size, codes, scales, sums);
    if (format.scale == HR_SCALE_E4M3)
        for (int64_t group = 0; group < num_groups; group++) scales[group] *= 256.0f;
}

// Whether these give the scalar kernels' bits on this machine (self_check.cpp).
bool has_scalar_bits(const PackedKernels& kernels);

// Products of fp8 weights with rows that are bfloat16, for processors that multiply pairs of them. Like
// those of LaidKernels (kernels.h) they add in an order of their own, subnormal values count as zeros,
// and a row alone has the bits of a row among many: one sum per group, which begins with 0; of each
// four inputs first the pair k, k+2 is added, then k+1, k+3, rounded as the processor's instruction
// does, with the weight / 256 (exact); then
//     sum = fma(sum of the group, scale * 256, sum)
struct PairKernels {
    // `count` values that are bfloat16 numbers, a multiple of 16, to what PackedRow holds as codes.
    void (*lay)(const float* values, int64_t count, int16_t* codes);
    void (*multiply)(const PackedProduct&);
};

// Whether these give nearly the scalar kernels' numbers, and a row alone the bits that it has among
// others (self_check.cpp).
bool is_near_scalar(const PairKernels& kernels);

extern const PackedKernels scalar_packed;
#if defined(HR_HAS_X86)
extern const PackedKernels avx2_packed;
extern const PackedKernels avx512_words_packed;
extern const PackedKernels avx512_packed;
extern const PackedKernels avx512_amd_packed;  // the same, reading as AMD's processors like it
extern const PackedKernels amx_packed;
extern const PairKernels avx512_pairs;
#endif
#if defined(HR_HAS_NEON)
extern const PackedKernels neon_packed;
#endif
