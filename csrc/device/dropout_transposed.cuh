// Which elements dropout keeps, for fragments whose rows are keys and whose columns are queries.
//
// The eight keys of one Philox counter (see dropout.cuh) are then the eight lanes with equal
// l % 4, so a counter is drawn by one of them and its eight bits are handed round.
#pragma once

#include "device/dropout.cuh"

namespace jaxflash::device {

// Bit n of the result: whether the counter's column n is kept.
__device__ __forceinline__ uint32_t kept_columns(const DropoutStream& stream, int row, int column) {
  const PhiloxWords drawn = philox4x32_7(
      {static_cast<uint32_t>(column / 8), static_cast<uint32_t>(row), stream.head, stream.batch},
      stream.seed0, stream.seed1);
  const uint32_t words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    bits |= static_cast<uint32_t>(is_kept(stream, words[n / 2], n % 2)) << n;
  }
  return bits;
}

// For 32 keys from `column` (a multiple of 8) and 8 kTilesN queries from `row`: bit 8 m + l / 4 of
// kept[2 j + parity] tells whether lane l keeps key column + 8 m + l / 4 of query
// row + 8 j + 2 (l % 4) + parity. All 32 lanes call it.
template <int kTilesN>
__device__ __forceinline__ void draw_kept(const DropoutStream& stream, int row, int column,
                                          int lane_idx, uint32_t (&kept)[2 * kTilesN]) {
  static_assert(kTilesN == 2 || kTilesN == 4, "8 lanes share the work as 4 x 2 or 8 x 1");
  constexpr int kQueries = 2 * kTilesN;  // per lane with equal l % 4
  constexpr int kLanesPerQuery = 8 / kQueries;
  constexpr int kGroups = 4 / kLanesPerQuery;  // of 8 keys, that a lane draws
  const int t = lane_idx % 4, query = lane_idx / 4 % kQueries;
  const int first_group = lane_idx / 4 / kQueries * kGroups;
  const int drawn_row = row + query / 2 * 8 + 2 * t + query % 2;
  uint32_t drawn = 0;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int group = first_group + i;
    drawn |= kept_columns(stream, drawn_row, column + 8 * group) << (8 * group);
  }
  if constexpr (kLanesPerQuery == 2) drawn |= __shfl_xor_sync(0xFFFFFFFF, drawn, 16);
#pragma unroll
  for (int i = 0; i < kQueries; ++i) {
    kept[i] = __shfl_sync(0xFFFFFFFF, drawn, 4 * i + t);
  }
}

}  // namespace jaxflash::device
