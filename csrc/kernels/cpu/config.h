// Tile sizes of the CPU kernels and the layout of one worker's scratch.
//
// Every kernel owns panels of 64 rows of one sequence (queries or keys) and streams the other
// sequence in tiles of 64 rows. The 64 owned rows run along the vector lanes, so that row maxima,
// row sums and every product are lane-wise and nothing is ever reduced across lanes.
// This header is shared by all instruction sets: constants and plain data only.
#pragma once

#include <cstdint>

namespace jaxflash::cpu {

constexpr int64_t kPanelLanes = 64;  // owned rows of a panel
constexpr int64_t kStreamRows = 64;  // rows of a streamed tile
constexpr int64_t kMaxPanels = 4;    // panels that may share one streamed tile
constexpr int64_t kTileFloats = kStreamRows * kPanelLanes;
constexpr int64_t kAlignmentFloats = 16;  // 64 bytes: one cache line, one AVX-512 vector
constexpr int64_t kDropoutColumns = 8;    // columns that share one Philox counter

static_assert(kStreamRows % kDropoutColumns == 0 && kPanelLanes % kDropoutColumns == 0,
              "a tile must hold whole Philox counters");

// Internal linkage: each instruction set must keep its own copy of these (see kernels.h).
static inline constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
static inline constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Tasks that cover the owned rows of one KV head of one sequence: its panels (those of all the
// query heads reading it, when queries are owned) in groups that share the streamed tiles.
static inline constexpr int64_t tasks_per_kv_head(int64_t owned_rows, int64_t owned_heads,
                                                  int64_t panels_per_task) {
  return ceil_div(ceil_div(owned_rows, kPanelLanes) * owned_heads, panels_per_task);
}

// Floats one worker needs; the slack lets a slot start at any address and be aligned by hand.
static inline constexpr int64_t forward_slot_floats(int64_t H, int64_t Hv) {
  const int64_t per_panel = (H + Hv + 2) * kPanelLanes;  // q, out, row_max, row_sum
  const int64_t streamed = round_up((H + Hv) * kStreamRows, kAlignmentFloats);
  return kMaxPanels * per_panel + streamed + 3 * kTileFloats + kAlignmentFloats;
}
static inline constexpr int64_t backward_slot_floats(int64_t H, int64_t Hv) {
  const int64_t per_panel = (2 * H + 2 * Hv + 3) * kPanelLanes;  // owned pair, its gradients, stats
  const int64_t streamed = round_up((H + Hv + 3) * kStreamRows, kAlignmentFloats);
  return kMaxPanels * per_panel + streamed + 5 * kTileFloats + kAlignmentFloats;
}

}  // namespace jaxflash::cpu
