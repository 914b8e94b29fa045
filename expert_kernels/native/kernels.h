// What one instruction set must offer: products of weights with a few rows of float32 values.
//
// **The order of additions is the contract.** It depends on the weights' shape alone, never on the
// number of rows or threads, on tiles, on addresses or on the instruction set:
//
//   dot_rows      weights [outputs, depth]: 16 partial sums, element k goes to sum k % 16 in
//                 ascending k, one fused multiply-add each; the tail is padded with zeros to 16.
//                 Then s[j] += s[j + 8] for j < 8, s[j] += s[j + 4], s[j] += s[j + 2], s[0] + s[1].
//   sum_columns   weights [depth, outputs]: one sum, ascending k, one fused multiply-add each.
//
// 16-bit weights are widened to float32 first, which is exact, and so are their products.
#pragma once

#include <cstdint>

constexpr int NUM_LANES = 16;

// Rows of x handed over at once: x[m] has at least depth values, followed by zeros up to a multiple
// of NUM_LANES. Result (m, n) goes to out[m * out_stride + n].
struct Product {
    const char* weights;    // the first row (dot_rows) or the first column (sum_columns) wanted
    int64_t stride_bytes;   // from one row of the weights to the next
    int32_t num_outputs;
    int32_t depth;
    const float* const* x;
    int32_t num_rows;
    float* out;
    int64_t out_stride;
    const char* next;  // weights of another product as large, asked for towards the end, or null
};

struct Kernels {
    void (*dot_rows[3])(const Product&);     // by HrDtype
    void (*sum_columns[3])(const Product&);  // by HrDtype
};

// Whether these kernels give the scalar ones' bits on this machine, by trying (self_check.cpp).
bool has_scalar_bits(const Kernels& kernels);

// Products of bfloat16 weights [outputs, depth] with rows that are bfloat16 as well, for processors
// that multiply pairs of them. What they add in which order is their own, and differs from dot_rows.
// Subnormal numbers count as zeros. It hangs on nothing but the depth, so a row alone has the bits of
// a row among many.
//
//   amx           per 32 inputs one sum of those with even k and one of those with odd k, ascending,
//                 one fused multiply-add each; both are added and then added to the output's sum
//   avx512_bf16   16 sums: of 32 inputs the pair 2j, 2j + 1 goes to sum j, ascending, rounded as the
//                 processor's instruction does; then joined as dot_rows joins them
//
// `lay` brings rows into the order they are read in. Rows go in blocks of LAID_BLOCK, a last one of
// what is left. For amx a block is [laid_depth / 2, rows of the block, 2], for avx512_bf16
// [rows of the block, laid_depth]; laid_depth is the depth rounded up to a multiple of LAID_INPUTS,
// zeros beyond depth. So a row takes laid_depth values of whatever block it is in, and a block of one
// row is the row itself.
constexpr int LAID_BLOCK = 16;
constexpr int LAID_INPUTS = 32;

struct LaidProduct {
    const char* weights;
    int64_t stride_bytes;
    int32_t num_outputs;
    int32_t depth;
    const uint16_t* x;  // aligned to 64 bytes
    int32_t num_rows;   // at most 2 * LAID_BLOCK
    float* out;
    int64_t out_stride;
    const char* next;  // weights of another product as large, asked for towards the end, or null
};

struct LaidKernels {
    // Inputs first (a multiple of LAID_BLOCK) .. first + count of each row, which rows[m] points to,
    // and zeros from there to `end`, into their places in the blocks at `to`.
    void (*lay)(const char* const* rows, int num_rows, int64_t first, int64_t count, int64_t end,
                int64_t laid_depth, uint16_t* to);
    void (*multiply)(const LaidProduct&);
};

// Whether these give nearly the scalar kernels' numbers, and a row alone the bits that it has among
// others (self_check.cpp).
bool is_near_scalar(const LaidKernels& kernels);

extern const Kernels scalar_kernels;
#if defined(HR_HAS_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_amd_kernels;
extern const LaidKernels avx512_laid;
extern const LaidKernels amx_laid;
#endif
#if defined(HR_HAS_NEON)
extern const Kernels neon_kernels;
#endif
