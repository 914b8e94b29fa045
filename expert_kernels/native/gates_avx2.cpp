// Gates, compiled for AVX2.

#include "gates_template.h"

extern const Gates avx2_gates = gates_of();
