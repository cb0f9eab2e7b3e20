// Copies tiles of rows from global to shared memory.
#pragma once

#include <cstdint>

#include "device/visibility.cuh"
#include "mma/shared_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/math.cuh"

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
// are never read. Needs features and row_stride to be multiples of a chunk.
template <int kNumThreads, class Element, class Tile, class IsValid>
__device__ __forceinline__ void load_rows_async(const Rows<Element>& rows, int begin, int end,
                                                const IsValid& is_valid, Tile* tile) {
  constexpr int kRowsPerPass = kNumThreads / Tile::kRowChunks;
  static_assert(Tile::kNumRows % kRowsPerPass == 0, "every pass must fill whole rows");
  // Opaque, or the compiler computes every tile's addresses before the loop and spills them.
  const int thread_idx = ptx::opaque(threadIdx.x);
  const int chunk = thread_idx % Tile::kRowChunks, first_row = thread_idx / Tile::kRowChunks;
  const bool has_chunk = chunk * Tile::kChunk < rows.features;
  const Element* source = rows.data + (begin + first_row) * rows.row_stride + chunk * Tile::kChunk;
#pragma unroll
  for (int pass = 0; pass < Tile::kNumRows / kRowsPerPass; ++pass) {
    const int row = first_row + pass * kRowsPerPass;
    const bool is_read = has_chunk && begin + row < end && is_valid(begin + row);
    ptx::cp_async_16(tile->address_of(row, chunk), source, is_read);
    source += kRowsPerPass * rows.row_stride;
  }
}

// The same copies for a loop over many tiles of one matrix: what a thread needs is computed once,
// which leaves three or four instructions for each 16 bytes.
template <int kNumThreads, class Element, class Tile>
class RowCopier {
 public:
  static constexpr int kRowsPerPass = kNumThreads / Tile::kRowChunks;
  static_assert(Tile::kNumRows % kRowsPerPass == 0, "every pass must fill whole rows");

  __device__ __forceinline__ RowCopier(const Rows<Element>& rows, int end) {
    const int chunk = threadIdx.x % Tile::kRowChunks, row = threadIdx.x / Tile::kRowChunks;
    source_ =
        reinterpret_cast<const char*>(rows.data + row * rows.row_stride + chunk * Tile::kChunk);
    end_ = chunk * Tile::kChunk < rows.features ? end - row : 0;
    tile_offset_ = sizeof(Element) * Tile::offset(row, chunk);
  }

  // row_bytes: from row to row of the matrix, below 2^27 (checked on the host).
  __device__ __forceinline__ void copy(int begin, uint32_t row_bytes, Tile* tile) const {
    const char* source = source_ + static_cast<uint64_t>(static_cast<uint32_t>(begin)) * row_bytes;
    const uint32_t destination = ptx::shared_address(tile->elements) + tile_offset_;
    const int rows_left = end_ - begin;
    const uint32_t step = kRowsPerPass * row_bytes;
#pragma unroll
    for (int pass = 0; pass < Tile::kNumRows / kRowsPerPass; ++pass) {
      constexpr int kRowBytes = Tile::kNumColumns * sizeof(Element);
      const int skip = pass * kRowsPerPass;
      // The first row and `skip` have no bit in common, so their swizzles combine by exclusive-or.
      const uint32_t address = (destination ^ Tile::swizzle(skip) * 16) + skip * kRowBytes;
      ptx::cp_async_16(address, source, skip < rows_left);
      source += step;
    }
  }

 private:
  const char* source_;    // this thread's chunk of its first row, were begin 0
  int end_;               // rows that may be read, counted from its first
  uint32_t tile_offset_;  // bytes from a tile to where its first row's chunk goes
};

// The same for any head dim, element by element, finished when it returns.
template <int kNumThreads, class Element, class Tile, class IsValid>
__device__ __forceinline__ void load_rows_elementwise(const Rows<Element>& rows, int begin, int end,
                                                      const IsValid& is_valid, Tile* tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < Tile::kNumRows * Tile::kNumColumns; i += kNumThreads) {
    const int row = i / Tile::kNumColumns, column = i % Tile::kNumColumns;
    const bool is_read = column < rows.features && begin + row < end && is_valid(begin + row);
    using Stored = typename Tile::Element;
    Stored value = 0;
    if (is_read) {
      value = reinterpret_cast<const Stored*>(rows.data)[(begin + row) * rows.row_stride + column];
    }
    tile->at(row, column) = value;
  }
}

}  // namespace jaxflash::fa2_sm80
