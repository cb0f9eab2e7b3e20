// A tile in shared memory, swizzled so that reads and writes meet no bank conflict, and the ways to
// read fragments (ptx/mma.cuh) out of it.
//
// Rows lie one after the other; inside each 128-byte group of a row, the 16-byte chunk c is stored
// in place c ^ swizzle(row). For 16-bit elements that is row % 8: the eight rows that one 8x8
// matrix reads at one chunk lie in eight different bank groups. Floats are read without ldmatrix,
// 32 bytes of four rows at a time, either rows r..r + 3 or every other row of eight; the swizzle
// moves pairs of chunks so that both kinds of four lie in four different groups of 32 bytes.
#pragma once

#include <cstdint>

#include "mma/fragment.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared_memory.cuh"

namespace jaxflash::mma {

// ElementType: uint16_t stands for either 16-bit type.
template <class ElementType, int kRows, int kColumns>
struct SharedTile {
  using Element = ElementType;
  static constexpr int kChunk = 16 / sizeof(Element);  // elements in 16 bytes
  static_assert(kColumns % (8 * kChunk) == 0, "a row must hold whole 128-byte groups");
  static_assert(kRows % 16 == 0, "fragments are read 16 rows at a time");
  static constexpr int kNumRows = kRows;
  static constexpr int kNumColumns = kColumns;
  static constexpr int kRowChunks = kColumns / kChunk;
  static constexpr int kBytes = kRows * kColumns * sizeof(Element);

  alignas(128) Element elements[kRows * kColumns];  // [kRows, kColumns], swizzled

  __device__ __forceinline__ static int swizzle(int row) {
    return sizeof(Element) == 2 ? row & 7 : ((row ^ row >> 1) & 3) * 2;
  }
  // Element offset of a 16-byte chunk.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kColumns + (chunk ^ swizzle(row)) * kChunk;
  }
  __device__ __forceinline__ Element* chunk_at(int row, int chunk) {
    return elements + offset(row, chunk);
  }
  __device__ __forceinline__ const Element* chunk_at(int row, int chunk) const {
    return elements + offset(row, chunk);
  }
  __device__ __forceinline__ uint32_t address_of(int row, int chunk) const {
    return ptx::shared_address(elements) + sizeof(Element) * offset(row, chunk);
  }
  __device__ __forceinline__ Element& at(int row, int column) {
    return elements[offset(row, column / kChunk) + column % kChunk];
  }

  // The loads and the store below want row % 8 == 0; the loads column % 16 == 0, the store
  // column % 8 == 0.

  // The fragment `a` (16 rows x 16 k) of rows row.. and columns column.. of this tile.
  __device__ __forceinline__ void load_a(int row, int column, int lane_idx,
                                         Fragment<Element>& a) const {
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = load_pair(row + i % 2 * 8, column + i / 2 * 8, lane_idx);
    } else {
      ptx::ldmatrix_x4(chunk_address(row, column, lane_idx % 16, lane_idx / 16), a);
    }
  }

  // The fragment `a` of this tile's transpose: 16 rows are columns column.. of this tile, 16 k are
  // its rows row..
  __device__ __forceinline__ void load_a_transposed(int row, int column, int lane_idx,
                                                    Fragment<Element>& a) const {
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = load_pair_transposed(row + i / 2 * 8, column + i % 2 * 8, lane_idx);
      }
    } else {
      const int matrix = lane_idx / 8;
      ptx::ldmatrix_x4_trans(chunk_address(row, column, matrix / 2 * 8 + lane_idx % 8, matrix % 2),
                             a);
    }
  }

  // Two fragments `b` (16 k x 8 columns each) where this tile holds [columns of b, k]: b[0], b[1]
  // for this tile's rows row..row + 7, b[2], b[3] for row + 8..row + 15; k = column..column + 15.
  __device__ __forceinline__ void load_b(int row, int column, int lane_idx,
                                         Fragment<Element>& b) const {
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = load_pair(row + i / 2 * 8, column + i % 2 * 8, lane_idx);
    } else {
      const int matrix = lane_idx / 8;
      ptx::ldmatrix_x4(chunk_address(row, column, matrix / 2 * 8 + lane_idx % 8, matrix % 2), b);
    }
  }

  // Two fragments `b` where this tile holds [k, columns of b]: b[0], b[1] for this tile's columns
  // column..column + 7, b[2], b[3] for column + 8..column + 15; k = row..row + 15.
  __device__ __forceinline__ void load_b_transposed(int row, int column, int lane_idx,
                                                    Fragment<Element>& b) const {
    if constexpr (kIsFloat) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        b[i] = load_pair_transposed(row + i % 2 * 8, column + i / 2 * 8, lane_idx);
      }
    } else {
      const int matrix = lane_idx / 8;
      ptx::ldmatrix_x4_trans(chunk_address(row, column, matrix % 2 * 8 + lane_idx % 8, matrix / 2),
                             b);
    }
  }

  // Writes two adjacent elements of a d fragment: its row `half` * 8 + lane / 4 and its columns
  // 2 (lane % 4) and the next.
  __device__ __forceinline__ void store_pair(int row, int column, int half, int lane_idx,
                                             ptx::Pair<Element> pair) {
    const int lane_row = lane_idx / 4, lane_chunk = kIsFloat ? swizzle(lane_row) : lane_row;
    const int lane_bytes = lane_idx % 4 * 2 * static_cast<int>(sizeof(Element));
    ptx::store_shared_pair(lane_address(row + 8 * half, column, lane_row, lane_chunk, lane_bytes),
                           pair);
  }

 private:
  static constexpr bool kIsFloat = sizeof(Element) == 4;

  // Address of byte lane_bytes of the chunk that lies lane_chunk after (row + lane_row, column),
  // where lane_chunk is the swizzle of lane_row, applied to 0 or 1. With row % 8 == 0 the column is
  // one exclusive-or with a term that the whole tile shares, and what is left of row and column is
  // an immediate of the access.
  __device__ __forceinline__ uint32_t lane_address(int row, int column, int lane_row,
                                                   int lane_chunk, int lane_bytes) const {
    const int bytes = static_cast<int>(sizeof(Element)) * column;
    const uint32_t lane_part = ptx::shared_address(elements) +
                               sizeof(Element) * (row + lane_row) * kColumns + lane_chunk * 16 +
                               lane_bytes;
    return (lane_part ^ (bytes & 127)) + (bytes & ~127);
  }

  // Address of a row of an 8x8 matrix for ldmatrix: chunk column / 8 + lane_chunk (0 or 1).
  __device__ __forceinline__ uint32_t chunk_address(int row, int column, int lane_row,
                                                    int lane_chunk) const {
    return lane_address(row, column, lane_row, lane_chunk ^ (lane_row & 7), 0);
  }

  // Floats at (row + lane / 4, columns column + 2 (lane % 4) and the next).
  __device__ __forceinline__ float2 load_pair(int row, int column, int lane_idx) const {
    const int lane_row = lane_idx / 4;
    return ptx::load_shared_pair(
        lane_address(row, column, lane_row, swizzle(lane_row), lane_idx % 4 * 8));
  }

  // Floats at (rows row + 2 (lane % 4) and the next, column + lane / 4).
  __device__ __forceinline__ float2 load_pair_transposed(int row, int column, int lane_idx) const {
    const int lane_row = lane_idx % 4 * 2, lane_chunk = swizzle(lane_row);
    const int lane_bytes = lane_idx / 4 * 4;
    // Where an even row has the eights of columns a, b, c, d, the next one has b, a, d, c.
    const uint32_t even = lane_address(row, column, lane_row, lane_chunk, lane_bytes);
    const uint32_t odd = lane_address(row + 1, column ^ 8, lane_row, lane_chunk, lane_bytes);
    return make_float2(ptx::load_shared(even), ptx::load_shared(odd));
  }
};

}  // namespace jaxflash::mma
