// Gates for the plain processor: the standard for all others.

#include "gates_template.h"

extern const Gates scalar_gates = gates_of();

int64_t item_bytes(int32_t dtype) { return dtype == HR_FLOAT32 ? 4 : 2; }
