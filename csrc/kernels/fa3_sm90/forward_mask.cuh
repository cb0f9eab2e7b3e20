// What the two rows of a lane see of a K/V block, as bits in the order of the lane's scores: bit n
// of a row is column 8 (n / 2) + n % 2 after the lane's first (ownership: ptx/wgmma.cuh). Found
// before the products are issued, while the other consumers compute, and where registers are free.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/forward_blocks.cuh"

namespace jaxflash::fa3_sm90 {

// Bits of the columns [first, end), counted from the lane's first.
__device__ __forceinline__ uint32_t column_bits(int first, int end) {
  const auto place = [](int column) {
    return column <= 0 ? 0 : 2 * (column / 8) + min(column % 8, 2);
  };
  return bit_range(place(first), place(end));
}

// bits[r] of row `row` + 8 r; key: the block's first. Reads nothing outside the lengths.
template <int kBlockKV>
__device__ __forceinline__ void find_visible(const device::Visibility& see, int row, int key,
                                             int lane_idx, uint32_t (&bits)[2]) {
  static_assert(kBlockKV <= 128, "a word holds 32 columns of a lane");
  const int column = key + 2 * (lane_idx % 4);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int place = row + 8 * r;
    const int end = min(see.kv_len, place + see.window_high + 1);
    bits[r] =
        place < see.query_len ? column_bits(place + see.window_low - column, end - column) : 0;
  }
  if (see.query_ids != nullptr) {
    int32_t ids[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ids[r] = row + 8 * r < see.query_len ? see.query_ids[row + 8 * r] : -1;
      if (ids[r] < 0) bits[r] = 0;
    }
#pragma unroll 8
    for (int n = 0; n < kBlockKV / 4; ++n) {
      const int32_t id = see.kv_ids[min(column + n / 2 * 8 + n % 2, see.kv_len - 1)];
#pragma unroll
      for (int r = 0; r < 2; ++r) bits[r] &= ~(static_cast<uint32_t>(id != ids[r]) << n);
    }
  }
  if (see.block_mask.data != nullptr) {
    const int last = (min(key + kBlockKV, see.kv_len) - 1) / see.mask_block_kv;
    int rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = min(row + 8 * r, see.query_len - 1) / see.mask_block_q;
#pragma unroll 1
    for (int block = key / see.mask_block_kv; block <= last; ++block) {
      const int first = block * see.mask_block_kv - column;
      const uint32_t covered = column_bits(first, first + see.mask_block_kv);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!device::block_is_kept(see, rows[r], block)) bits[r] &= ~covered;
      }
    }
  }
}

}  // namespace jaxflash::fa3_sm90
