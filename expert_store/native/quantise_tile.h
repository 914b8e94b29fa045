// The work of quantise.cpp on one tile, for one instruction set: whoever includes this says how many
// floats a register holds (HR_LANES) and what the function is called (HR_TILE_FUNCTION). Nothing is
// contracted or reordered, so tiles have the same bits everywhere.
#include <cmath>
#include <cstring>

#include "quantise.h"

#define HR_HOT __attribute__((always_inline)) inline

namespace {

constexpr int kTileOutputs = 16;
constexpr int kLanes = HR_LANES;
constexpr int kMaxGroup = 128;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding and taking off rounds to whole numbers

enum Kind { kInt8, kInt4, kMxfp4, kNvfp4, kFp8 };
enum Scale { kFloat32, kFloat16, kBfloat16, kE8m0, kE4m3 };

HR_HOT uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

HR_HOT float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 0 for steps whose inverse may not be finite: what they would divide counts as 0.
HR_HOT float inverse(float step) {
  return std::fabs(step) < 1.17549435e-38f ? 0.0f : 1.0f / step;
}

// As many weights at a time as a register of the processor holds.
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint8_t Codes __attribute__((vector_size(kLanes)));

template <typename Vector, typename T>
HR_HOT Vector loaded(const T* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename To, typename From>
HR_HOT To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// To nearest, ties to even; |value| < 2^22.
HR_HOT Floats rounded(Floats value) { return (value + kRounder) - kRounder; }

HR_HOT float rounded(float value) { return (value + kRounder) - kRounder; }

HR_HOT Floats clamped(Floats value, float low, float high) {
  const Floats lows = Floats{} + low, highs = Floats{} + high;
  value = value < lows ? lows : value;
  return value > highs ? highs : value;
}

HR_HOT float clamped(float value, float low, float high) {
  return value < low ? low : (value > high ? high : value);
}

uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u;
  uint32_t size = bits & 0x7FFFFFFFu;
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // beyond 65504
  if (size < 0x38800000u) {  // below 2^-14: multiples of 2^-24
    const float steps = float_of(size) * 16777216.0f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded(steps)));
  }
  size += 0xFFFu + ((size >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((size - 0x38000000u) >> 13));
}

float from_float16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u;
  const uint32_t fraction = half & 0x3FFu;
  if (exponent == 0) {
    const float size = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -size : size;
  }
  if (exponent == 31) return float_of(sign | 0x7F800000u);
  return float_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

// |value| <= 448.
template <typename Number, typename Whole, typename Result>
HR_HOT Result e4m3_codes(Number value) {
  const Whole bits = same_bits<Whole>(value), size = bits & 0x7FFFFFFFu;
  const Whole normal = ((size + 0x7FFFFu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6: multiples of 2^-9; the sum with the rounder holds them in its low bits.
  const Whole small = same_bits<Whole>(same_bits<Number>(size) * 512.0f + kRounder) & 15u;
  return ((bits >> 24) & 0x80u) | (size < 0x3C800000u ? small : normal);
}

HR_HOT uint32_t to_e4m3(float value) { return e4m3_codes<float, uint32_t, uint32_t>(value); }

HR_HOT float from_e4m3(uint32_t code) {
  const uint32_t size = code & 0x7Fu;
  const float small = static_cast<float>(static_cast<int32_t>(size)) * 0.001953125f;
  const float value = size < 8u ? small : float_of((size + (120u << 3)) << 20);
  return code & 0x80u ? -value : value;
}

HR_HOT Floats from_e4m3(Bits code) {
  const Bits size = code & 0x7Fu;
  const Floats small = __builtin_convertvector(same_bits<Ints>(size), Floats) * 0.001953125f;
  const Bits found = size < 8u ? same_bits<Bits>(small) : (size + (120u << 3)) << 20;
  return same_bits<Floats>(found | ((code & 0x80u) << 24));
}

struct Group {
  alignas(64) float values[kMaxGroup];  // zeros beyond the last input
  alignas(64) uint8_t codes[kMaxGroup];
};

template <int size>
HR_HOT void read_group(const HrQuantiseJob& job, int64_t output, int64_t begin, Group& group) {
  const int64_t left = job.num_inputs - begin;
  const int count = left < size ? static_cast<int>(left) : size;
  const int64_t at = output * job.source_stride + begin;
  if (job.is_bfloat16) {
    const uint16_t* source = static_cast<const uint16_t*>(job.source) + at;
    if (count == size) {
      for (int i = 0; i < size; i += kLanes) {
        const Bits wide = __builtin_convertvector(loaded<Halves>(source + i), Bits) << 16;
        std::memcpy(group.values + i, &wide, sizeof wide);
      }
      return;
    }
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      const Bits wide = __builtin_convertvector(loaded<Halves>(source + i), Bits) << 16;
      std::memcpy(group.values + i, &wide, sizeof wide);
    }
    for (; i < count; ++i) group.values[i] = float_of(static_cast<uint32_t>(source[i]) << 16);
  } else {
    std::memcpy(group.values, static_cast<const float*>(job.source) + at, 4 * count);
  }
  for (int i = count; i < size; ++i) group.values[i] = 0.0f;
}

// The largest of them, by halves.
HR_HOT int32_t largest_of(Ints values) {
  int32_t each[kLanes];
  std::memcpy(each, &values, sizeof each);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) each[i] = each[i] > each[i + half] ? each[i] : each[i + half];
  }
  return each[0];
}

HR_HOT float largest_size(const float* values, int count) {
  Ints most = {};
  for (int i = 0; i < count; i += kLanes) {
    const Ints size = loaded<Ints>(values + i) & 0x7FFFFFFF;
    most = size > most ? size : most;
  }
  return float_of(static_cast<uint32_t>(largest_of(most)));
}

// The largest value, at least 0, and the least, at most 0. Floats from 0 up are ordered as their
// bits are.
HR_HOT void range_of(const float* values, int count, float& low, float& high) {
  Floats most = {}, least = {};
  for (int i = 0; i < count; i += kLanes) {
    const Floats value = loaded<Floats>(values + i);
    most = value > most ? value : most;
    least = value < least ? value : least;
  }
  high = float_of(static_cast<uint32_t>(largest_of(same_bits<Ints>(most))));
  low = 0.0f - float_of(static_cast<uint32_t>(largest_of(same_bits<Ints>(least) & 0x7FFFFFFF)));
}

// Writes the scale and gives it back as it will be read.
float stored_scale(int32_t kind, float scale, uint8_t* to) {
  if (kind == kFloat32) {
    std::memcpy(to, &scale, 4);
    return scale;
  }
  const uint16_t half = kind == kFloat16 ? to_float16(scale) : to_bfloat16(scale);
  std::memcpy(to, &half, 2);
  return kind == kFloat16 ? from_float16(half) : float_of(static_cast<uint32_t>(half) << 16);
}

// Keeps the codes of a register of weights, and adds the squares of what they miss and of the weights.
struct Sums {
  Floats errors = {};
  Floats sizes = {};
};

HR_HOT void keep(Group& group, int at, Ints codes, Floats means, Sums& sums) {
  const Codes bytes = __builtin_convertvector(codes, Codes);
  std::memcpy(group.codes + at, &bytes, sizeof bytes);
  const Floats values = loaded<Floats>(group.values + at), errors = means - values;
  sums.errors += errors * errors;
  sums.sizes += values * values;
}

HR_HOT void code_int8(Group& group, int count, float step, Sums& sums) {
  const float by = inverse(step);
  for (int i = 0; i < count; i += kLanes) {
    const Floats scaled = loaded<Floats>(group.values + i) * by;
    const Floats code = clamped(rounded(scaled), -127.0f, 127.0f);
    keep(group, i, __builtin_convertvector(code, Ints), code * step, sums);
  }
}

HR_HOT void code_int4(Group& group, int count, float step, Sums& sums) {
  const float by = inverse(step);
  for (int i = 0; i < count; i += kLanes) {
    const Floats scaled = loaded<Floats>(group.values + i) * by;
    const Floats code = clamped(rounded(scaled), -8.0f, 7.0f);
    keep(group, i, __builtin_convertvector(code, Ints) + 8, code * step, sums);
  }
}

HR_HOT uint8_t code_int4_from(Group& group, int count, float step, float low, Sums& sums) {
  const float by = inverse(step);
  const float zero = clamped(rounded(-low * by), 0.0f, 15.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Floats scaled = loaded<Floats>(group.values + i) * by;
    const Floats code = clamped(rounded(scaled + zero), 0.0f, 15.0f);
    keep(group, i, __builtin_convertvector(code, Ints), (code - zero) * step, sums);
  }
  return static_cast<uint8_t>(zero);
}

HR_HOT void code_fp8(Group& group, int count, float step, Sums& sums) {
  const float by = inverse(step);
  for (int i = 0; i < count; i += kLanes) {
    const Floats scaled = loaded<Floats>(group.values + i) * by;
    const Bits code = e4m3_codes<Floats, Bits, Bits>(clamped(scaled, -448.0f, 448.0f));
    keep(group, i, same_bits<Ints>(code), from_e4m3(code) * step, sums);
  }
}

HR_HOT void code_e2m1(Group& group, int count, float step, Sums& sums) {
  const float by = inverse(step);
  for (int i = 0; i < count; i += kLanes) {
    const Floats scaled = loaded<Floats>(group.values + i) * by;
    Floats size = same_bits<Floats>(same_bits<Bits>(scaled) & 0x7FFFFFFFu);
    // Values lie 1/2 apart below 2, 1 below 4 and 2 up to 6.
    const Ints is_small = size < 2.0f, is_large = size >= 4.0f;
    const Floats ones = Floats{} + 1.0f;
    const Floats per_unit = is_small ? ones * 2.0f : (is_large ? ones * 0.5f : ones);
    const Floats unit = is_small ? ones * 0.5f : (is_large ? ones * 2.0f : ones);
    Floats steps = rounded(clamped(size, 0.0f, 8.0f) * per_unit);
    steps = is_large & (steps > 3.0f) ? ones * 3.0f : steps;
    // Comparisons give -1 where they hold.
    const Ints first = 2 + 2 * is_small - 2 * is_large, is_below = scaled < 0.0f;
    const Ints codes = __builtin_convertvector(steps, Ints) + first;
    const Floats sizes = steps * unit;
    keep(group, i, codes - 8 * is_below, (is_below ? -sizes : sizes) * step, sums);
  }
}

// Lines of 16 dwords: this output's dword of each.
template <int kind, int size>
HR_HOT void write_codes(const HrQuantiseJob& job, Group& group, int64_t begin, int lane,
                        uint8_t* lines) {
  for (int64_t i = job.num_inputs - begin; i < size; ++i) group.codes[i] = 0;
  uint8_t* to = lines + 4 * lane;
  if (kind == kInt8 || kind == kFp8) {
    for (int i = 0; i < size; i += 4, to += 64) std::memcpy(to, group.codes + i, 4);
    return;
  }
  for (int i = 0; i < size; i += 8, to += 64) {
    uint32_t low, high;
    std::memcpy(&low, group.codes + i, 4);
    std::memcpy(&high, group.codes + i + 4, 4);
    low |= high << 4;
    std::memcpy(to, &low, 4);
  }
}

uint32_t e8m0_code(float largest) {
  if (largest == 0.0f) return 124;
  const uint32_t bits = bits_of(largest);
  const int32_t code = static_cast<int32_t>(bits >> 23) - 2 + ((bits & 0x7FFFFFu) > 0x600000u);
  return code < 0 ? 0u : static_cast<uint32_t>(code);
}

template <int kind, int size>
HR_HOT void fill_tile(const HrQuantiseJob& job, int64_t tile, double* sums) {
  static const int kScaleBytes[] = {4, 2, 2, 1, 1};
  const int scale_bytes = kScaleBytes[job.scale];
  const int64_t num_groups = (job.num_inputs + size - 1) / size;
  const int per_record = job.groups_per_record;
  const int header = kind == kNvfp4 ? 4 * kTileOutputs : 0;
  const int record_scales =
      per_record * kTileOutputs * (scale_bytes + (job.has_zero_points ? 1 : 0));
  const int code_bytes = kTileOutputs * size * (kind == kInt8 || kind == kFp8 ? 8 : 4) / 8;
  uint8_t* const out = job.tiles + tile * job.tile_stride;
  Group group;
  Sums squares;
  for (int lane = 0; lane < kTileOutputs; ++lane) {
    const int64_t output = tile * kTileOutputs + lane;
    if (output >= job.num_outputs) break;
    float output_scale = 0.0f, by_output = 0.0f;
    if (kind == kNvfp4) {
      float largest = 0.0f;
      for (int64_t g = 0; g < num_groups; ++g) {
        read_group<size>(job, output, g * size, group);
        const float found = largest_size(group.values, size);
        largest = found > largest ? found : largest;
      }
      output_scale = largest / (6.0f * 448.0f);
      by_output = inverse(6.0f * output_scale);
      std::memcpy(out + 4 * lane, &output_scale, 4);
    }
    squares = Sums();
    uint8_t* at = out + header;
    int within = 0;
    for (int64_t g = 0; g < num_groups; ++g) {
      uint8_t* const scale_at = at + (within * kTileOutputs + lane) * scale_bytes;
      read_group<size>(job, output, g * size, group);
      switch (kind) {
        case kInt8: {
          const float scale = largest_size(group.values, size) / 127.0f;
          code_int8(group, size, stored_scale(job.scale, scale, scale_at), squares);
          break;
        }
        case kInt4: {
          float low, high;
          range_of(group.values, size, low, high);
          if (job.has_zero_points) {
            const float step = stored_scale(job.scale, (high - low) / 15.0f, scale_at);
            const int zeros = per_record * kTileOutputs * scale_bytes;
            at[zeros + within * kTileOutputs + lane] = code_int4_from(group, size, step, low, squares);
          } else {
            const float scale = (high > -low ? high : low) / -8.0f;
            code_int4(group, size, stored_scale(job.scale, scale, scale_at), squares);
          }
          break;
        }
        case kMxfp4: {
          const uint32_t code = e8m0_code(largest_size(group.values, size));
          *scale_at = static_cast<uint8_t>(code);
          code_e2m1(group, size, float_of(code ? code << 23 : 0x400000u), squares);
          break;
        }
        case kNvfp4: {
          const float relative = largest_size(group.values, size) * by_output;
          const uint32_t code = to_e4m3(relative > 448.0f ? 448.0f : relative);
          *scale_at = static_cast<uint8_t>(code);
          code_e2m1(group, size, from_e4m3(code) * output_scale, squares);
          break;
        }
        default: {
          const float scale = largest_size(group.values, size) / 448.0f;
          code_fp8(group, size, stored_scale(job.scale, scale, scale_at), squares);
        }
      }
      write_codes<kind, size>(job, group, g * size, lane,
                  at + record_scales + static_cast<int64_t>(within) * code_bytes);
      if (++within == per_record) {
        within = 0;
        at += record_scales + static_cast<int64_t>(per_record) * code_bytes;
      }
    }
    for (int i = 0; i < kLanes; ++i) {
      sums[0] += squares.errors[i];
      sums[1] += squares.sizes[i];
    }
  }
}

template <int kind>
HR_HOT bool fill_tile_of(const HrQuantiseJob& job, int64_t tile, double* sums) {
  if (job.group_size == 16) return fill_tile<kind, 16>(job, tile, sums), true;
  if (job.group_size == 32) return fill_tile<kind, 32>(job, tile, sums), true;
  if (job.group_size == 64) return fill_tile<kind, 64>(job, tile, sums), true;
  if (job.group_size == 128) return fill_tile<kind, 128>(job, tile, sums), true;
  return false;
}

}  // namespace

// False for a job that makes no sense.
bool HR_TILE_FUNCTION(const HrQuantiseJob& job, int64_t tile, double* sums) {
  switch (job.kind) {
    case kInt8: return fill_tile_of<kInt8>(job, tile, sums);
    case kInt4: return fill_tile_of<kInt4>(job, tile, sums);
    case kMxfp4: return job.group_size == 32 && (fill_tile<kMxfp4, 32>(job, tile, sums), true);
    case kNvfp4: return job.group_size == 16 && (fill_tile<kNvfp4, 16>(job, tile, sums), true);
    case kFp8: return job.group_size == 128 && (fill_tile<kFp8, 128>(job, tile, sums), true);
    default: return false;
  }
}
