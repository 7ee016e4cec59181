// How the threads of a team share a linear layer: pieces of some panels for one chunk of rows, and
// within a piece the tiles of rows that pass over each panel.
#pragma once

#include <algorithm>

#include "linear_store.h"

namespace quire {

constexpr int kMaxPieceTiles = 48;  // tens of microseconds: what others may wait for at the end
constexpr int kChunkRows = 96;      // stay in level-2 cache while panels pass

// Calls `tile(row, num_rows, panel, ahead)` for some of the tiles, of `tile_rows` rows at most;
// panel `ahead` is wanted soon. Returns when all tiles are done.
template <class Tile>
void for_each_tile(const LinearArgs& args, Team team, int tile_rows, const Tile& tile) {
  const int64_t num_panels = linear_panels(*args.weights);
  const int64_t num_chunks = (args.num_rows + kChunkRows - 1) / kChunkRows;
  // Enough pieces that no thread waits long at the end; enough panels that they stream.
  const int64_t wanted = (16 * team.size + num_chunks - 1) / std::max<int64_t>(num_chunks, 1);
  const int64_t most =
      kMaxPieceTiles * tile_rows * num_chunks / std::max<int64_t>(args.num_rows, 1);
  const int64_t panels_each = std::max<int64_t>(1, std::min(num_panels / wanted, most));
  const int64_t num_pieces = (num_panels + panels_each - 1) / panels_each * num_chunks;
  for (int64_t piece = team.stage->take(), next = 0; piece < num_pieces; piece = next) {
    const int64_t first = piece / num_chunks * panels_each, chunk = piece % num_chunks;
    const int64_t end = std::min(first + panels_each, num_panels);
    // Even shares of the rows: two tiles of 10 and one of 11 rather than 12, 12 and 7.
    const int64_t begin = args.num_rows * chunk / num_chunks;
    const int64_t num_rows = args.num_rows * (chunk + 1) / num_chunks - begin;
    const int64_t num_tiles = (num_rows + tile_rows - 1) / tile_rows;
    for (int64_t panel = first; panel < end; ++panel) {
      // The next piece is taken before this one's last panel, to know what to fetch meanwhile.
      if (panel + 1 == end) next = team.stage->take();
      int64_t following = panel + 1 < end ? panel + 1 : next / num_chunks * panels_each;
      if (following >= num_panels) following = panel;
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t row = begin + num_rows * i / num_tiles;
        tile(row, begin + num_rows * (i + 1) / num_tiles - row, panel, i == 0 ? following : panel);
      }
    }
    team.stage->finish();
  }
  team.stage->wait(num_pieces);
}

}  // namespace quire
