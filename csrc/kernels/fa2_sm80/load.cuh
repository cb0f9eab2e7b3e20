// Copies tiles of rows from global to shared memory.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "mma/shared_tile.cuh"
#include "ptx/cp_async.cuh"

namespace jaxflash::fa2_sm80 {

// Rows of one head: row r starts at data + r * row_stride.
template <class Element>
struct Rows {
  const Element* data;  // [rows, features]
  int64_t row_stride;   // elements
  int features;
};

// Starts copying rows [begin, begin + Tile::kNumRows) with 16-byte cp.async; the caller commits.
// Rows from `end` on, those is_valid(row) rejects and features beyond the head dim become zeros and
// are never read. Needs features and row_stride to be multiples of 8.
template <int kNumThreads, class Element, class Tile, class IsValid>
__device__ __forceinline__ void load_rows_async(const Rows<Element>& rows, int begin, int end,
                                                const IsValid& is_valid, Tile* tile) {
  constexpr int kRowsPerPass = kNumThreads / Tile::kRowChunks;
  static_assert(Tile::kNumRows % kRowsPerPass == 0, "every pass must fill whole rows");
  // Opaque, or the compiler computes every tile's addresses before the loop and spills them.
  int thread_idx = threadIdx.x;
  asm volatile("" : "+r"(thread_idx));
  const int chunk = thread_idx % Tile::kRowChunks, first_row = thread_idx / Tile::kRowChunks;
  const bool has_chunk = chunk * mma::kChunk < rows.features;
  const Element* source = rows.data + (begin + first_row) * rows.row_stride + chunk * mma::kChunk;
#pragma unroll
  for (int pass = 0; pass < Tile::kNumRows / kRowsPerPass; ++pass) {
    const int row = first_row + pass * kRowsPerPass;
    const bool is_read = has_chunk && begin + row < end && is_valid(begin + row);
    ptx::cp_async_16(tile->address_of(row, chunk), source, is_read);
    source += kRowsPerPass * rows.row_stride;
  }
}

// The same for any head dim, element by element, finished when it returns.
template <int kNumThreads, class Element, class Tile, class IsValid>
__device__ __forceinline__ void load_rows_elementwise(const Rows<Element>& rows, int begin, int end,
                                                      const IsValid& is_valid, Tile* tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Tile::kNumRows * Tile::kNumColumns; i += kNumThreads) {
    const int row = i / Tile::kNumColumns, column = i % Tile::kNumColumns;
    const bool is_read = column < rows.features && begin + row < end && is_valid(begin + row);
    uint16_t bits = 0;
    if (is_read) {
      bits = reinterpret_cast<const uint16_t*>(rows.data)[(begin + row) * rows.row_stride + column];
    }
    tile->at(row, column) = bits;
  }
}

}  // namespace jaxflash::fa2_sm80
