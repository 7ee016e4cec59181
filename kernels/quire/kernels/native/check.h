// What a step's indices may be, looked at before anything is read or written through one of them.
#pragma once

#include "quire.h"

namespace quire {

// Refuses `values` that are not from 0 to `end` - 1, and names the least or the greatest.
QuireRefusal check_indices(QuireIndex what, const int64_t* values, int64_t count, int64_t end);

// Refuses slots of adapters beyond the last, and those below -1.
QuireRefusal check_slots(const int32_t* slots, int64_t count, int64_t num_slots);

// A step's rows: their tokens, lengths and block tables.
QuireRefusal check_rows(const AttendArgs& args);

}  // namespace quire
