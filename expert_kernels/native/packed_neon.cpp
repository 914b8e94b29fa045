// 64-bit Arm's Advanced SIMD: a line is four registers.

#include <arm_neon.h>

#include "packed_template.h"

namespace {

struct Neon {
    static constexpr int LANES = 4;
    static constexpr bool HAS_BYTE_PRODUCTS = false;
    static constexpr bool KNOWS_SIZES = false;
    static constexpr int TILES = 1;
    static constexpr int FLOAT_TILES = 1;
    static constexpr int ROWS = 2;
    static constexpr int FLOAT_ROWS = 1;
    using Int = int32x4_t;
    using Words = int16x8_t;
    using Float = float32x4_t;
    using Table = int8x16_t;

    static Int zero_int() { return vdupq_n_s32(0); }
    static Float zero_float() { return vdupq_n_f32(0.0f); }
    static int8x16_t line(const char* at) { return vld1q_s8(reinterpret_cast<const int8_t*>(at)); }
    __attribute__((always_inline)) static void prefetch(const char* address) { __builtin_prefetch(address, 0, 3); }

    static Table table(const int8_t* values) { return vld1q_s8(values); }
    static Words even(int8x16_t bytes) {
        return vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s8(bytes), 8), 8);
    }
    static Words odd(int8x16_t bytes) { return vshrq_n_s16(vreinterpretq_s16_s8(bytes), 8); }
    static void decode4(const char* at, const Table& table, Words (&w)[4]) {
        const uint8x16_t codes = vreinterpretq_u8_s8(line(at));
        const int8x16_t first = vqtbl1q_s8(table, vandq_u8(codes, vdupq_n_u8(15)));
        const int8x16_t second = vqtbl1q_s8(table, vshrq_n_u8(codes, 4));
        w[0] = even(first);
        w[1] = even(second);
        w[2] = odd(first);
        w[3] = odd(second);
    }
    static void decode8(const char* at, Words (&w)[2]) {
        const int8x16_t codes = line(at);
        w[0] = even(codes);
        w[1] = odd(codes);
    }
    // Words s eeee mmm 0.. moved so that they are float16 numbers of 1 / 256 of the value.
    static void widen_pairs(int16x8_t words, Float& low, Float& high) {
        const int16x8_t halves = vandq_s16(vshrq_n_s16(words, 1), vdupq_n_s16(int16_t(0xbf80)));
        const int16x8_t ordered = vuzp1q_s16(halves, halves);
        const int16x8_t others = vuzp2q_s16(halves, halves);
        low = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(ordered)));
        high = vcvt_f32_f16(vreinterpret_f16_s16(vget_low_s16(others)));
    }
    static void decode_fp8(const char* at, Float (&w)[4]) {
        const int16x8_t codes = vreinterpretq_s16_s8(line(at));
        widen_pairs(vshlq_n_s16(codes, 8), w[0], w[2]);
        widen_pairs(codes, w[1], w[3]);
    }
    static Int dot(Int sum, Words w, const int16_t* pair) {
        int32_t both;
        memcpy(&both, pair, sizeof both);
        const int16x8_t x = vreinterpretq_s16_s32(vdupq_n_s32(both));
        return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(x)),
                                         vmull_high_s16(w, x)));
    }
    static Int minus(Int sum, const char* zeros, int32_t count) {
        int32_t values[4];
        for (int i = 0; i < 4; i++) values[i] = uint8_t(zeros[i]);
        return vmlsq_s32(sum, vld1q_s32(values), vdupq_n_s32(count));
    }
    static Float to_float(Int value) { return vcvtq_f32_s32(value); }
    static Float load(const char* from) {
        Float value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    static Float scale(int kind, const char* from) {
        if (kind == HR_SCALE_FLOAT32) return load(from);
        if (kind == HR_SCALE_FLOAT16 || kind == HR_SCALE_BFLOAT16) {
            uint16x4_t bits;
            memcpy(&bits, from, sizeof bits);
            if (kind == HR_SCALE_FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
            return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
        }
        uint32_t bits[4];
        for (int i = 0; i < 4; i++) bits[i] = uint8_t(from[i]);
        const uint32x4_t wide = vld1q_u32(bits);
        if (kind == HR_SCALE_E8M0) return vreinterpretq_f32_u32(vshlq_n_u32(wide, 23));
        const int16x4_t words = vreinterpret_s16_u16(vshl_n_u16(vmovn_u32(wide), 8));
        const int16x4_t halves = vand_s16(vshr_n_s16(words, 1), vdup_n_s16(int16_t(0xbf80)));
        return vcvt_f32_f16(vreinterpret_f16_s16(halves));
    }
    static Float multiply(Float a, float b) { return vmulq_n_f32(a, b); }
    static Float multiply(Float a, Float b) { return vmulq_f32(a, b); }
    static Float add(Float a, Float b) { return vaddq_f32(a, b); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    static Float fma(Float a, float b, Float c) { return vfmaq_n_f32(c, a, b); }
    static void store(float* to, Float value) { vst1q_f32(to, value); }
};

}  // namespace

extern const PackedKernels neon_packed = packed_of<Neon>();
