#include "linear_pieces.h"

#include <algorithm>

#include "linear_store.h"
#include "low_rank.h"

namespace quire {
namespace {

constexpr int kPiecesPerThread = 16;  // enough that no thread waits long at the end
constexpr int kMaxPieceTiles = 48;    // tens of microseconds, for which others may wait at the end
constexpr int kChunkRows = 96;        // these stay in level-2 cache while panels pass

int64_t num_chunks(const LinearArgs& args) { return (args.num_rows + kChunkRows - 1) / kChunkRows; }

LinearTiles tiles_of(const LinearArgs& args) {
  if (args.weights->is_int8) return int8_tiles();
  return args.weights->group ? w4_tiles(args) : plain_tiles(args);
}

// The pieces of one layer.
struct Pieces {
  Pieces(const LinearArgs& args, int64_t wanted_panels)
      : args(args),
        tiles(tiles_of(args)),
        panels(linear_panels(*args.weights)),
        chunks(num_chunks(args)) {
    // Several panels in a row, so that weights stream from memory.
    const int64_t most = kMaxPieceTiles * tiles.rows * chunks / std::max<int64_t>(args.num_rows, 1);
    panels_each = std::max<int64_t>(1, std::min(wanted_panels, most));
    count = (panels + panels_each - 1) / panels_each * chunks;
  }

  // Computes a piece. `take_next` returns this thread's next piece. It is called before the last
  // panel is computed, so that the next piece's first panel can be prefetched.
  template <class TakeNext>
  void run(int64_t piece, const TakeNext& take_next) const {
    const int64_t first = piece / chunks * panels_each, chunk = piece % chunks;
    const int64_t end = std::min(first + panels_each, panels);
    // Tiles of about equal size: two tiles of 10 rows and one of 11, not 12, 12 and 7.
    const int64_t begin = args.num_rows * chunk / chunks;
    const int64_t num_rows = args.num_rows * (chunk + 1) / chunks - begin;
    const int64_t num_tiles = (num_rows + tiles.rows - 1) / tiles.rows;
    LinearArgs args = this->args;
    alignas(64) float addend[kChunkRows * kPanelColumns];
    const auto tile_row = [&](int64_t i) { return begin + num_rows * i / num_tiles; };
    bool adds = false, tile_adds[kChunkRows];
    for (int64_t i = 0; args.low_rank && i < num_tiles; ++i)
      adds |= tile_adds[i] = args.low_rank->has_any(tile_row(i), tile_row(i + 1));
    args.addend_row = begin;
    if (adds) std::fill_n(addend, num_rows * kPanelColumns, LowRankLayer::kNothing);
    int64_t panel = wanted_panel(first, end, begin, num_rows);
    if (panel == end) take_next();
    while (panel < end) {
      const int64_t later = wanted_panel(panel + 1, end, begin, num_rows);
      int64_t following = later < end ? later : take_next() / chunks * panels_each;
      if (following >= panels) following = panel;
      if (adds) args.low_rank->expand(begin, begin + num_rows, panel, following, addend);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t row = tile_row(i), num = tile_row(i + 1) - row;
        if (adds) args.addend = tile_adds[i] ? addend : nullptr;
        if (args.wanted)
          wanted_rows(row, row + num, panel, following);
        else
          tiles.tile(args, row, num, panel, i == 0 ? following : panel);
      }
      panel = later;
    }
  }

  // The first panel from `panel` on of which one of some rows needs a column, or `end`.
  int64_t wanted_panel(int64_t panel, int64_t end, int64_t row, int64_t num_rows) const {
    if (!args.wanted) return panel;
    for (; panel < end; ++panel)
      for (int64_t i = row; i < row + num_rows; ++i)
        if (wants(i, panel)) return panel;
    return end;
  }

  // Computes the rows of a tile that need a column of the panel, neighbouring rows at once.
  void wanted_rows(int64_t row, int64_t end, int64_t panel, int64_t following) const {
    while (row < end) {
      const int64_t begin = row;
      while (row < end && wants(row, panel)) ++row;
      if (row > begin) tiles.tile(args, begin, row - begin, panel, following);
      if (row == begin) ++row;
    }
  }

  bool wants(int64_t row, int64_t panel) const {
    const WantedColumns& wanted = *args.wanted;
    const int64_t mask = wanted.mask_of[row], token = wanted.first_column + panel * kPanelColumns;
    if (mask < 0) return true;
    static_assert(kPanelColumns == 32, "a panel is a word of the masks, or parts of two");
    const uint32_t* words = wanted.masks + mask * wanted.num_words;
    const int64_t word = token / 32, shift = token % 32;
    if (word < wanted.num_words && words[word] >> shift) return true;
    return shift && word + 1 < wanted.num_words && words[word + 1] << (32 - shift);
  }

  const LinearArgs& args;
  const LinearTiles tiles;
  const int64_t panels;
  const int64_t chunks;
  int64_t panels_each;
  int64_t count;
};

}  // namespace
}  // namespace quire

using namespace quire;

void linears_part(const LinearArgs* layers, int64_t count, Team team) {
  int64_t work = 0;
  for (int64_t i = 0; i < count; ++i)
    work += linear_panels(*layers[i].weights) * num_chunks(layers[i]);
  const int64_t wanted_panels = work / (kPiecesPerThread * team.size);
  int64_t before = 0;  // number of pieces of earlier layers
  int64_t piece = team.stage->take();
  for (int64_t i = 0; i < count; ++i) {
    const Pieces pieces(layers[i], wanted_panels);
    while (piece < before + pieces.count) {
      int64_t next = piece;
      pieces.run(piece - before, [&] { return (next = team.stage->take()) - before; });
      team.stage->finish();
      piece = next;
    }
    before += pieces.count;
  }
  team.stage->wait(before);
}

void linear_part(const LinearArgs& args, Team team) { linears_part(&args, 1, team); }

void quire_linear(const LinearArgs* args, int32_t num_threads) {
  parallel(num_threads, [=](Team team) { linear_part(*args, team); });
}
