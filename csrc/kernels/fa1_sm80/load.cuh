// Copies tiles of rows from global to shared memory; what must not be observed becomes zeros.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "mma/shared_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa1_sm80 {

// Of either 16-bit type.
template <int kRows, int kColumns>
using Tile16 = mma::SharedTile<uint16_t, kRows, kColumns>;
constexpr int kChunk = 8;  // elements in 16 bytes

// Rows of one head of one batch entry: row r starts at data + r * row_stride.
struct HeadRows {
  const uint16_t* data;  // [rows, features], 16-bit elements
  int64_t row_stride;    // elements
  int features;
};

// data: [B, rows, heads, features].
__device__ __forceinline__ HeadRows head_rows(const void* data, int64_t batch, int64_t rows,
                                              int64_t num_heads, int64_t head, int64_t features) {
  return {static_cast<const uint16_t*>(data) + (batch * rows * num_heads + head) * features,
          num_heads * features, static_cast<int>(features)};
}

// Copies rows [begin, begin + Tile::kNumRows). Rows from `end` on, those that is_valid(row) rejects
// and features beyond the head dim become zeros and are never read. With kIsGeneral any number of
// features will do; else it must be a multiple of 8. Starts 16-byte cp.async copies, which the
// caller commits, except for odd head dims, whose elements are copied one by one at once.
template <bool kIsGeneral, int kNumThreads, class Tile, class IsValid>
__device__ __forceinline__ void load_rows(const HeadRows& rows, int begin, int end,
                                          const IsValid& is_valid, Tile& tile) {
  if (kIsGeneral && rows.features % kChunk != 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < Tile::kNumRows * Tile::kNumColumns; i += kNumThreads) {
      const int row = i / Tile::kNumColumns, column = i % Tile::kNumColumns;
      const bool is_read = column < rows.features && begin + row < end && is_valid(begin + row);
      tile.at(row, column) = is_read ? rows.data[(begin + row) * rows.row_stride + column] : 0;
    }
    return;
  }
  constexpr int kRowsPerPass = kNumThreads / Tile::kRowChunks;
  static_assert(Tile::kNumRows % kRowsPerPass == 0, "every pass must fill whole rows");
  const int thread_idx = ptx::opaque(threadIdx.x);
  const int chunk = thread_idx % Tile::kRowChunks, first_row = thread_idx / Tile::kRowChunks;
  const bool has_chunk = chunk * kChunk < rows.features;
  const uint16_t* source = rows.data + (begin + first_row) * rows.row_stride + chunk * kChunk;
#pragma unroll
  for (int pass = 0; pass < Tile::kNumRows / kRowsPerPass; ++pass) {
    const int row = begin + first_row + pass * kRowsPerPass;
    ptx::cp_async_16(tile.address_of(row - begin, chunk), source,
                     has_chunk && row < end && is_valid(row));
    source += kRowsPerPass * rows.row_stride;
  }
}

}  // namespace jaxflash::fa1_sm80
