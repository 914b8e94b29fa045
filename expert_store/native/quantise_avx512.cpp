#define HR_LANES 16
#define HR_TILE_FUNCTION hr_quantise_tile_avx512
#include "quantise_tile.h"
