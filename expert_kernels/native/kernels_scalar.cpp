// One value at a time: for processors without anything better, and the standard for all others.

#include "kernel_template.h"
#include "number_formats.h"

namespace {

struct Scalar {
    static constexpr int LANES = 1;
    static constexpr int OUTPUTS = 1;
    static constexpr int ONE_ROW_OUTPUTS = 1;
    static constexpr int AHEAD_BYTES = 512;
    static constexpr int FARTHER_BYTES = 0;
    static constexpr int OUTPUTS_OF_ROWS = 1;
    static constexpr int ROWS = 1;
    using Reg = float;

    static Reg zero() { return 0.0f; }
    static Reg load(const float* source) { return *source; }
    static Reg broadcast(float value) { return value; }
    static void store(float* target, Reg value) { *target = value; }
    static Reg fma(Reg a, Reg b, Reg c) { return __builtin_fmaf(a, b, c); }
    static void prefetch(const char*) {}

    template <int D>
    static Reg widen(const char* source) {
        if constexpr (D == HR_FLOAT32) {
            float value;
            memcpy(&value, source, sizeof value);
            return value;
        } else {
            uint16_t bits;
            memcpy(&bits, source, sizeof bits);
            return D == HR_BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
        }
    }

    static float reduce(const Reg (&sums)[NUM_LANES]) {
        float s[NUM_LANES];
        memcpy(s, sums, sizeof s);
        for (int half = NUM_LANES / 2; half >= 1; half /= 2)
            for (int j = 0; j < half; j++) s[j] += s[j + half];
        return s[0];
    }
};

}  // namespace

const Kernels scalar_kernels = kernels_of<Scalar>();
