// Gates, compiled for AVX-512 (foundation).

#include "gates_template.h"

extern const Gates avx512_gates = gates_of();
