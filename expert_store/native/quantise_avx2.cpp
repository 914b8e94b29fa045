#define HR_LANES 8
#define HR_TILE_FUNCTION hr_quantise_tile_avx2
#include "quantise_tile.h"
