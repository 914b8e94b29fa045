// Floats to tiles of codes, near the speed of reading them. C interface, called through ctypes by
// expert_store/native_quantising.py. What is computed is what expert_store/quantising.py says, bit
// for bit; where it lies is what expert_store/formats.py says.
#ifndef HEADRACE_QUANTISE_H
#define HEADRACE_QUANTISE_H

#include <cstdint>

extern "C" {

struct HrQuantiseJob {
  int32_t kind;        // 0 int8, 1 int4, 2 mxfp4, 3 nvfp4, 4 fp8
  int32_t scale;       // 0 float32, 1 float16, 2 bfloat16, 3 e8m0, 4 e4m3
  int32_t group_size;  // at most 128
  int32_t has_zero_points;
  int32_t is_bfloat16;  // of the source; else float32
  int32_t groups_per_record;
  int32_t is_plain;  // for tests: what every processor can do, nothing more
  int32_t reserved;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t source_stride;  // elements from one output to the next
  int64_t tile_stride;    // bytes from one tile to the next
  const void* source;
  uint8_t* tiles;  // zeros
  double error_square;  // results: sums over all weights
  double size_square;
};

int32_t hr_quantise_version();

// 0, or 1 when the job makes no sense.
int32_t hr_quantise(HrQuantiseJob* job);
}

#endif
