// Values of any dtype, widened to float (exact) or, where whole numbers take part, to double.
#pragma once

#include <cstdint>
#include <cstring>

#include "dense.h"
#include "number_formats.h"

namespace {

constexpr int CHUNK = 256;  // values that are widened at once

inline int64_t bytes_of(int16_t dtype) {
    switch (dtype) {
        case HR_VALUE_FLOAT32: return 4;
        case HR_VALUE_BFLOAT16:
        case HR_VALUE_FLOAT16: return 2;
        case HR_VALUE_BOOL: return 1;
        default: return 8;
    }
}

template <class S>
S read_as(const char* source) {
    S value;
    memcpy(&value, source, sizeof value);
    return value;
}

// count values from `source` on, `stride` elements apart, as T: where they lie if they lie so,
// else in `buffer`.
template <class T>
const T* widen_values(int16_t dtype, const char* source, int64_t stride, int count, T* buffer) {
    const auto each = [&](auto of) {
        if (stride == 0) {
            const T value = of(0);
            for (int i = 0; i < count; i++) buffer[i] = value;
        } else if (stride == 1) {
            for (int i = 0; i < count; i++) buffer[i] = of(i);
        } else {
            for (int i = 0; i < count; i++) buffer[i] = of(i * stride);
        }
    };
    switch (dtype) {
        case HR_VALUE_FLOAT32:
            if (stride == 1 && sizeof(T) == sizeof(float))
                return reinterpret_cast<const T*>(source);
            each([=](int64_t i) { return T(read_as<float>(source + i * 4)); });
            break;
        case HR_VALUE_BFLOAT16:
            each([=](int64_t i) { return T(float_of_bfloat16(read_as<uint16_t>(source + i * 2))); });
            break;
        case HR_VALUE_FLOAT16:
            each([=](int64_t i) { return T(float_of_float16(read_as<uint16_t>(source + i * 2))); });
            break;
        case HR_VALUE_INT64:
            each([=](int64_t i) { return T(read_as<int64_t>(source + i * 8)); });
            break;
        default: each([=](int64_t i) { return T(source[i] != 0); });
    }
    return buffer;
}

template <class S>
void write_as(char* target, S value) {
    memcpy(target, &value, sizeof value);
}

template <class T>
void narrow_values(int16_t dtype, char* target, int64_t stride, int count, const T* values) {
    const auto each = [&](auto put) {
        if (stride == 1)
            for (int i = 0; i < count; i++) put(i, values[i]);
        else
            for (int i = 0; i < count; i++) put(i * stride, values[i]);
    };
    switch (dtype) {
        case HR_VALUE_FLOAT32:
            if (reinterpret_cast<const char*>(values) == target && stride == 1 && sizeof(T) == 4)
                return;
            each([=](int64_t i, T value) { write_as(target + i * 4, float(value)); });
            break;
        case HR_VALUE_BFLOAT16:
            each([=](int64_t i, T value) {
                const uint32_t bits = bits_of_float(round_to_bfloat16(float(value)));
                write_as(target + i * 2, uint16_t(bits >> 16));
            });
            break;
        case HR_VALUE_FLOAT16:
            each([=](int64_t i, T value) {
                write_as(target + i * 2, bits_of_float16(float(value)));
            });
            break;
        case HR_VALUE_INT64:
            each([=](int64_t i, T value) { write_as(target + i * 8, int64_t(value)); });
            break;
        default: each([=](int64_t i, T value) { target[i] = value != 0; });
    }
}

// Calls body(offsets) for every place of the first num_dims dimensions of `sizes`; offsets are in
// elements, one for each of the K operands.
template <int K, class Body>
void for_each_place(const int32_t* sizes, int num_dims, const HrOperand* const (&operands)[K],
                    Body body) {
    int32_t place[HR_MAX_DIMS] = {};
    int64_t offsets[K] = {};
    for (;;) {
        body(offsets);
        int d = num_dims - 1;
        for (; d >= 0; d--) {
            for (int k = 0; k < K; k++) offsets[k] += operands[k]->strides[d];
            if (++place[d] < sizes[d]) break;
            for (int k = 0; k < K; k++)
                offsets[k] -= int64_t(operands[k]->strides[d]) * sizes[d];
            place[d] = 0;
        }
        if (d < 0) return;
    }
}

}  // namespace
