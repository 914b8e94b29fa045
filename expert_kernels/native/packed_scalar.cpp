// One dword of a line at a time: the standard for all others.

#include "number_formats.h"
#include "packed_template.h"

namespace {

struct Scalar {
    static constexpr int LANES = 1;
    static constexpr bool HAS_BYTE_PRODUCTS = false;
    static constexpr bool KNOWS_SIZES = false;
    static constexpr int TILES = 1;
    static constexpr int FLOAT_TILES = 1;
    static constexpr int ROWS = 1;
    static constexpr int FLOAT_ROWS = 1;
    using Int = int32_t;
    struct Words {
        int32_t low, high;
    };
    using Float = float;
    struct Table {
        const int8_t* values;
    };

    static Int zero_int() { return 0; }
    static Float zero_float() { return 0.0f; }
    static void prefetch(const char*) {}
    static int byte(const char* at, int index) { return uint8_t(at[index]); }

    static Table table(const int8_t* values) { return {values}; }
    static void decode4(const char* at, const Table& table, Words (&w)[4]) {
        const auto value = [&](int input) {
            return int32_t(table.values[byte(at, input % 4) >> (input / 4 * 4) & 15]);
        };
        w[0] = {value(0), value(2)};
        w[1] = {value(4), value(6)};
        w[2] = {value(1), value(3)};
        w[3] = {value(5), value(7)};
    }
    static void decode8(const char* at, Words (&w)[2]) {
        const auto value = [at](int input) { return int32_t(int8_t(byte(at, input))); };
        w[0] = {value(0), value(2)};
        w[1] = {value(1), value(3)};
    }
    // s eeee mmm as a float16 number of 1 / 256 of the value.
    static float fp8(int code) {
        return float_of_float16(uint16_t((code & 0x80) << 8 | (code & 0x7f) << 7));
    }
    static void decode_fp8(const char* at, Float (&w)[4]) {
        for (int j = 0; j < 4; j++) w[j] = fp8(byte(at, j));
    }
    static Int dot(Int sum, Words w, const int16_t* pair) {
        return sum + w.low * pair[0] + w.high * pair[1];
    }
    static Int minus(Int sum, const char* zeros, int32_t count) {
        return sum - byte(zeros, 0) * count;
    }
    static Float to_float(Int value) { return float(value); }
    static Float load(const char* from) {
        float value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    static Float scale(int kind, const char* from) {
        uint16_t half = 0;
        switch (kind) {
            case HR_SCALE_FLOAT32: return load(from);
            case HR_SCALE_FLOAT16: memcpy(&half, from, 2); return float_of_float16(half);
            case HR_SCALE_BFLOAT16: memcpy(&half, from, 2); return float_of_bfloat16(half);
            case HR_SCALE_E8M0: return float_of_bits(uint32_t(byte(from, 0)) << 23);
            default: return fp8(byte(from, 0));
        }
    }
    static Float multiply(Float a, float b) { return a * b; }
    static Float add(Float a, Float b) { return a + b; }
    static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }
    static void store(float* to, Float value) { *to = value; }
};

}  // namespace

const PackedKernels scalar_packed = packed_of<Scalar>();

bool find_packed_format(const HrForm& form, PackedFormat& format) {
    const int32_t kind = form.kind, size = form.group_size;
    if (kind < HR_INT8 || kind > HR_FP8 || form.scale < 0 || form.scale > HR_SCALE_E4M3)
        return false;
    const bool is_integer = kind == HR_INT8 || kind == HR_INT4;
    if (is_integer ? size != 32 && size != 64 && size != 128
                   : size != (kind == HR_MXFP4 ? 32 : kind == HR_NVFP4 ? 16 : 128))
        return false;
    const int32_t wanted = kind == HR_MXFP4   ? HR_SCALE_E8M0
                           : kind == HR_NVFP4 ? HR_SCALE_E4M3
                                              : HR_SCALE_FLOAT32;
    if (is_integer ? form.scale > HR_SCALE_BFLOAT16 : form.scale != wanted) return false;
    if (form.has_zero_points && kind != HR_INT4) return false;
    format.kind = kind;
    format.scale = form.scale;
    format.group_size = size;
    format.has_zero_points = form.has_zero_points;
    format.scale_bytes = form.scale == HR_SCALE_FLOAT32 ? 4 : form.scale <= HR_SCALE_BFLOAT16 ? 2 : 1;
    format.groups_per_record = form.has_zero_points ? 4 : 4 / format.scale_bytes;
    format.record_scale_bytes = format.groups_per_record * TILE_OUTPUTS *
                                (format.scale_bytes + (form.has_zero_points ? 1 : 0));
    format.group_code_bytes =
        TILE_OUTPUTS * size / (kind == HR_INT8 || kind == HR_FP8 ? 1 : 2);
    format.header_bytes = kind == HR_NVFP4 ? TILE_OUTPUTS * int32_t(sizeof(float)) : 0;
    return true;
}

int64_t packed_groups(const PackedFormat& format, int64_t depth) {
    return (depth + format.group_size - 1) / format.group_size;
}

int64_t packed_tile_bytes(const PackedFormat& format, int64_t depth) {
    const int64_t groups = packed_groups(format, depth);
    const int64_t records = (groups + format.groups_per_record - 1) / format.groups_per_record;
    return format.header_bytes + records * format.record_scale_bytes +
           groups * format.group_code_bytes;
}
