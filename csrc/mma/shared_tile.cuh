// A tile of 16-bit elements in shared memory, swizzled so that ldmatrix meets no bank conflict, and
// the ways to read mma.sync fragments out of it.
//
// Rows lie one after the other; inside each 128-byte group of a row, the 16-byte chunk c is stored
// in place c ^ (row % 8). The eight rows that one 8x8 matrix reads at one chunk then lie in eight
// different bank groups, and so do the chunks that a warp writes along a row.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"

namespace jaxflash::mma {

constexpr int kChunk = 8;  // elements in 16 bytes

template <int kRows, int kColumns>
struct SharedTile {
  static_assert(kColumns % 64 == 0, "a row must hold whole 128-byte groups");
  static_assert(kRows % 16 == 0, "fragments are read 16 rows at a time");
  static constexpr int kNumRows = kRows;
  static constexpr int kNumColumns = kColumns;
  static constexpr int kRowChunks = kColumns / kChunk;
  static constexpr int kBytes = kRows * kColumns * 2;

  alignas(128) uint16_t elements[kRows * kColumns];  // [kRows, kColumns], swizzled

  // Element offset of a 16-byte chunk.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kColumns + (chunk ^ (row & 7)) * kChunk;
  }
  __device__ __forceinline__ uint16_t* chunk_at(int row, int chunk) {
    return elements + offset(row, chunk);
  }
  __device__ __forceinline__ const uint16_t* chunk_at(int row, int chunk) const {
    return elements + offset(row, chunk);
  }
  __device__ __forceinline__ uint32_t address_of(int row, int chunk) const {
    return ptx::shared_address(elements) + 2 * offset(row, chunk);
  }
  __device__ __forceinline__ uint16_t& at(int row, int column) {
    return elements[offset(row, column / kChunk) + column % kChunk];
  }

  // Address of the chunk (row + lane_row, column / 8 + lane_chunk), where lane_row depends on the
  // lane alone and lane_chunk is 0 or 1. With row % 8 == 0 and column % 16 == 0 the swizzle is one
  // exclusive-or of the column with a term that the whole tile shares, and what is left of row and
  // column is an immediate of the load.
  __device__ __forceinline__ uint32_t lane_address(int row, int column, int lane_row,
                                                   int lane_chunk) const {
    const uint32_t lane_part = ptx::shared_address(elements) + 2 * (row + lane_row) * kColumns +
                               (lane_chunk ^ (lane_row & 7)) * 16;
    return (lane_part ^ (2 * column & 127)) + (2 * column & ~127);
  }

  // The four loads below want row % 8 == 0 and column % 16 == 0.

  // The fragment `a` (16 rows x 16 k) of rows row.. and columns column.. of this tile.
  __device__ __forceinline__ void load_a(int row, int column, int lane_idx,
                                         uint32_t (&a)[4]) const {
    ptx::ldmatrix_x4(lane_address(row, column, lane_idx % 16, lane_idx / 16), a);
  }

  // The fragment `a` of this tile's transpose: 16 rows are columns column.. of this tile, 16 k are
  // its rows row..
  __device__ __forceinline__ void load_a_transposed(int row, int column, int lane_idx,
                                                    uint32_t (&a)[4]) const {
    const int matrix = lane_idx / 8;
    ptx::ldmatrix_x4_trans(lane_address(row, column, matrix / 2 * 8 + lane_idx % 8, matrix % 2), a);
  }

  // Two fragments `b` (16 k x 8 columns each) where this tile holds [columns of b, k]: b[0], b[1]
  // for this tile's rows row..row + 7, b[2], b[3] for row + 8..row + 15; k = column..column + 15.
  __device__ __forceinline__ void load_b(int row, int column, int lane_idx,
                                         uint32_t (&b)[4]) const {
    const int matrix = lane_idx / 8;
    ptx::ldmatrix_x4(lane_address(row, column, matrix / 2 * 8 + lane_idx % 8, matrix % 2), b);
  }

  // Two fragments `b` where this tile holds [k, columns of b]: b[0], b[1] for this tile's columns
  // column..column + 7, b[2], b[3] for column + 8..column + 15; k = row..row + 15.
  __device__ __forceinline__ void load_b_transposed(int row, int column, int lane_idx,
                                                    uint32_t (&b)[4]) const {
    const int matrix = lane_idx / 8;
    ptx::ldmatrix_x4_trans(lane_address(row, column, matrix % 2 * 8 + lane_idx % 8, matrix / 2), b);
  }

  // Writes two adjacent elements of a d fragment (ptx/mma.cuh): its row `half` * 8 + lane / 4 and
  // its columns 2 (lane % 4) and the next. row % 8 == 0, column % 8 == 0; no bank conflict.
  __device__ __forceinline__ void store_pair(int row, int column, int half, int lane_idx,
                                             uint32_t pair) {
    const int lane_row = lane_idx / 4;
    const uint32_t lane_part = ptx::shared_address(elements) +
                               2 * (row + 8 * half + lane_row) * kColumns + lane_row * 16 +
                               lane_idx % 4 * 4;
    const uint32_t address = (lane_part ^ (2 * column & 127)) + (2 * column & ~127);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
  }
};

}  // namespace jaxflash::mma
