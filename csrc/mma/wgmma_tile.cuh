// A tile of 16-bit elements in shared memory as TMA writes it and wgmma reads it.
//
// The columns are cut into slabs of 64; a slab holds its rows one after the other, 128 bytes each,
// and stores 16-byte chunk c of row r in place c ^ (r % 8) (the 128-byte swizzle of both engines).
// The last slab may have columns that no product reads.
//
// A descriptor (PTX ISA, "Matrix Descriptor Format") has in its low word the address and the
// leading offset, in its high word the stride between groups of 8 rows and the swizzle mode, all in
// units of 16 bytes. The high word is a constant, so that a step along the summed dim is one 32-bit
// addition.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.cuh"
#include "ptx/wgmma.cuh"

namespace jaxflash::mma {

constexpr uint32_t kSwizzle128 = 0x40000000;
constexpr uint32_t kHighSwizzled = kSwizzle128 | (1024 >> 4);  // 8 rows of 128 bytes

__device__ __forceinline__ uint32_t descriptor_low(uint32_t address, uint32_t leading_bytes) {
  return ((address & 0x3FFFF) >> 4) | ((leading_bytes >> 4) << 16);
}

// How a product reads tiles: innermost dim summed (K-major), or outermost (MN-major, transposed).
template <bool kIsTransposedA, bool kIsTransposedB>
using TileOperands =
    ptx::WgmmaOperands<kHighSwizzled, kHighSwizzled, kIsTransposedA, kIsTransposedB>;

template <int kRows, int kColumns>
struct WgmmaTile {
  static_assert(kColumns % 16 == 0, "products sum over 16 columns at a time");
  static_assert(kRows % 8 == 0, "the swizzle repeats every 8 rows");
  static constexpr int kNumRows = kRows;
  static constexpr int kNumColumns = kColumns;
  static constexpr int kNumSlabs = (kColumns + 63) / 64;
  static constexpr int kSlabBytes = kRows * 128;
  static constexpr int kBytes = kNumSlabs * kSlabBytes;

  alignas(1024) uint16_t slabs[kNumSlabs][kRows * 64];

  // Columns summed: low word for 16 columns from 16 step.
  __device__ __forceinline__ uint32_t k_major() const {
    return descriptor_low(ptx::shared_address(slabs), 0);
  }
  __device__ __forceinline__ static constexpr uint32_t k_major_step(int step) {
    return step / 4 * (kSlabBytes >> 4) + step % 4 * (32 >> 4);
  }

  // Rows summed: low word for 16 rows from 16 step.
  __device__ __forceinline__ uint32_t mn_major() const {
    return descriptor_low(ptx::shared_address(slabs), kSlabBytes);
  }
  __device__ __forceinline__ static constexpr uint32_t mn_major_step(int step) {
    return step * (16 * 128 >> 4);
  }

  // The 16 bytes at `row` and columns 8 chunk ...: their shared address, and themselves.
  __device__ __forceinline__ uint32_t chunk_address(int row, int chunk) const {
    return ptx::shared_address(slabs) + chunk_offset(row, chunk);
  }
  __device__ __forceinline__ uint4* chunk_at(int row, int chunk) {
    return reinterpret_cast<uint4*>(reinterpret_cast<char*>(slabs) + chunk_offset(row, chunk));
  }

 private:
  __device__ __forceinline__ static uint32_t chunk_offset(int row, int chunk) {
    return chunk / 8 * kSlabBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
  }
};

}  // namespace jaxflash::mma
