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
};

struct Kernels {
    void (*dot_rows[3])(const Product&);     // by HrDtype
    void (*sum_columns[3])(const Product&);  // by HrDtype
};

// Whether these kernels give the scalar ones' bits on this machine, by trying (self_check.cpp).
bool has_scalar_bits(const Kernels& kernels);

extern const Kernels scalar_kernels;
#if defined(HR_HAS_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif
#if defined(HR_HAS_NEON)
extern const Kernels neon_kernels;
#endif
