// Divides linear layers among the threads of a team (`linear_pieces.cpp`). A piece is some panels
// for one chunk of rows. Within a piece, each panel is computed tile by tile, a few rows at a time.
#pragma once

#include "quire.h"
#include "simd.h"

namespace quire {

constexpr int kPanelColumns = 2 * kLanes;

// Computes some rows of one panel, and prefetches panel `ahead`.
using LinearTile = void (*)(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel,
                            int64_t ahead);

// The function that computes a layer's tiles, and the most rows of a tile.
struct LinearTiles {
  LinearTile tile;
  int rows;
};

// The tiles of weights in the input's type, in int8 and of 4 bits.
LinearTiles plain_tiles(const LinearArgs& args);
LinearTiles int8_tiles();
LinearTiles w4_tiles(const LinearArgs& args);

}  // namespace quire
