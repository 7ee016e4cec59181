// How the threads of a team share linear layers: pieces of some panels for one chunk of rows, and
// within a piece the tiles of rows that pass over each panel (`linear_pieces.cpp`).
#pragma once

#include "quire.h"
#include "simd.h"

namespace quire {

constexpr int kPanelColumns = 2 * kLanes;

// Computes some rows of one panel; panel `ahead` is wanted soon.
using LinearTile = void (*)(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel,
                            int64_t ahead);

// What computes a layer's tiles, of so many rows at most.
struct LinearTiles {
  LinearTile tile;
  int rows;
};

// Of weights in the input's own type, in int8 and of 4 bits.
LinearTiles plain_tiles(const LinearArgs& args);
LinearTiles int8_tiles();
LinearTiles w4_tiles(const LinearArgs& args);

}  // namespace quire
