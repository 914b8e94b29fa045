// The join of a layer-step: result rows weighted by the router and added up in its order.
//
//     out[r] = round(w[r, 0] * rows[r, 0] + w[r, 1] * rows[r, 1] + ...)    from left to right
//
// Every product and every sum is rounded to float32 (this file is compiled without contraction), so
// the bits are the same on every machine; the last step rounds to the dtype of `out`.

#include <algorithm>

#include "experts.h"
#include "number_formats.h"

namespace {

constexpr int64_t PIECE = 256;  // values whose sums are kept in the first cache

float widen(int32_t dtype, const void* values, int64_t index) {
    if (dtype == HR_FLOAT32) return static_cast<const float*>(values)[index];
    const uint16_t bits = static_cast<const uint16_t*>(values)[index];
    return dtype == HR_BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
}

}  // namespace

int32_t hr_weighted_sum(const HrWeightedSum* sum) {
    for (const int32_t dtype : {sum->weights_dtype, sum->out_dtype})
        if (dtype < HR_FLOAT32 || dtype > HR_FLOAT16) return 2;
    const int64_t hidden_size = sum->hidden_size, top_k = sum->top_k;
    float total[PIECE];
    for (int64_t row = 0; row < sum->num_rows; row++) {
        for (int64_t begin = 0; begin < hidden_size; begin += PIECE) {
            const int64_t count = std::min(PIECE, hidden_size - begin);
            for (int64_t k = 0; k < top_k; k++) {
                const float* values = sum->rows + (row * top_k + k) * hidden_size + begin;
                const float weight = widen(sum->weights_dtype, sum->weights, row * top_k + k);
                if (k == 0)
                    for (int64_t i = 0; i < count; i++) total[i] = values[i] * weight;
                else
                    for (int64_t i = 0; i < count; i++) total[i] += values[i] * weight;
            }
            const int64_t first = row * hidden_size + begin;
            if (sum->out_dtype == HR_FLOAT32) {
                std::copy(total, total + count, static_cast<float*>(sum->out) + first);
                continue;
            }
            uint16_t* out = static_cast<uint16_t*>(sum->out) + first;
            if (sum->out_dtype == HR_BFLOAT16)
                for (int64_t i = 0; i < count; i++)
                    out[i] = uint16_t(bits_of_float(round_to_bfloat16(total[i])) >> 16);
            else
                for (int64_t i = 0; i < count; i++) out[i] = bits_of_float16(total[i]);
        }
    }
    return 0;
}
