// Range checks of a step's indices, made before anything is read or written through one of them.
#pragma once

#include "quire.h"

namespace quire {

// Refuses `values` outside 0 to `end` - 1. Reports the least if it is negative, else the greatest.
QuireRefusal check_indices(QuireIndex what, const int64_t* values, int64_t count, int64_t end);

// Refuses adapter slots outside -1 to `num_slots` - 1.
QuireRefusal check_slots(const int32_t* slots, int64_t count, int64_t num_slots);

// Checks a step's rows: their query starts, sequence lengths and block tables.
QuireRefusal check_rows(const AttendArgs& args);

}  // namespace quire
