// Before an instruction set is used at all: does it give the scalar kernels' bits on this machine?
// A compiler, an emulator or a processor that gets it wrong must cost speed, never a token.

#include <cstdint>
#include <cstring>
#include <vector>

#include "experts.h"
#include "kernels.h"

namespace {

constexpr int NUM_OUTPUTS = 37, DEPTH = 53, NUM_ROWS = 9, PADDED_DEPTH = 64;

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
                found[i].resize(size_t(NUM_ROWS) * NUM_OUTPUTS);
                Product product{};
                product.weights = weights.data();
                product.stride_bytes = (is_columns ? NUM_OUTPUTS : DEPTH) * item;
                product.num_outputs = NUM_OUTPUTS;
                product.depth = DEPTH;
                product.x = x;
                product.num_rows = NUM_ROWS;
                product.out = found[i].data();
                product.out_stride = NUM_OUTPUTS;
                (is_columns ? both[i]->sum_columns : both[i]->dot_rows)[dtype](product);
            }
            if (memcmp(found[0].data(), found[1].data(), found[0].size() * sizeof(float)))
                return false;
        }
    }
    return true;
}
