// 64-bit Arm's Advanced SIMD, which every such processor has: 4 lanes, four vectors of sums.

#include <arm_neon.h>

#include "kernel_template.h"

namespace {

struct Neon {
    static constexpr int LANES = 4;
    static constexpr int OUTPUTS = 4;
    static constexpr int ONE_ROW_OUTPUTS = 4;
    static constexpr int AHEAD_BYTES = 512;
    static constexpr int FARTHER_BYTES = 0;
    static constexpr int OUTPUTS_OF_ROWS = 2;
    static constexpr int ROWS = 2;
    using Reg = float32x4_t;

    static Reg zero() { return vdupq_n_f32(0.0f); }
    static Reg load(const float* source) { return vld1q_f32(source); }
    static Reg broadcast(float value) { return vdupq_n_f32(value); }
    static void store(float* target, Reg value) { vst1q_f32(target, value); }
    static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
    __attribute__((always_inline)) static void prefetch(const char* address) { __builtin_prefetch(address, 0, 3); }

    template <int D>
    static Reg widen(const char* source) {
        if constexpr (D == HR_FLOAT32) {
            Reg value;
            memcpy(&value, source, sizeof value);
            return value;
        } else {
            uint16x4_t bits;
            memcpy(&bits, source, sizeof bits);
            if constexpr (D == HR_FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
            return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
        }
    }

    static float reduce(const Reg (&sums)[4]) {
        const float32x4_t s =
            vaddq_f32(vaddq_f32(sums[0], sums[2]), vaddq_f32(sums[1], sums[3]));
        const float32x2_t pair = vadd_f32(vget_low_f32(s), vget_high_f32(s));
        return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
    }
};

}  // namespace

extern const Kernels neon_kernels = kernels_of<Neon>();
