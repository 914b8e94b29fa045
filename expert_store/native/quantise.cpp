#define HR_LANES 4
#define HR_TILE_FUNCTION hr_quantise_tile
#include "quantise_tile.h"

#ifdef HR_HAS_X86
bool hr_quantise_tile_avx2(const HrQuantiseJob&, int64_t, double*);
bool hr_quantise_tile_avx512(const HrQuantiseJob&, int64_t, double*);
#endif

namespace {

using TileFunction = bool (*)(const HrQuantiseJob&, int64_t, double*);

TileFunction best_function() {
#ifdef HR_HAS_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return hr_quantise_tile_avx512;
  }
  if (__builtin_cpu_supports("avx2")) return hr_quantise_tile_avx2;
#endif
  return hr_quantise_tile;
}

}  // namespace

int32_t hr_quantise_version() { return 1; }

int32_t hr_quantise(HrQuantiseJob* job) {
  static const TileFunction best = best_function();
  if (job->scale < 0 || job->scale > 4 || job->groups_per_record < 1) return 1;
  const TileFunction fill = job->is_plain ? hr_quantise_tile : best;
  double sums[2] = {0.0, 0.0};
  for (int64_t tile = 0; tile * 16 < job->num_outputs; ++tile) {
    if (!fill(*job, tile, sums)) return 1;
  }
  job->error_square = sums[0];
  job->size_square = sums[1];
  return 0;
}
