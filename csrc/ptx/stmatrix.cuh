// stmatrix: 8x8 matrices of 16-bit elements from registers to shared memory; the inverse of
// ldmatrix.
#pragma once

#include <cstdint>

#include "ptx/shared_memory.cuh"

namespace jaxflash::ptx {

// stmatrix.sync.aligned.m8n8.x4.shared.b16 (PTX ISA 7.8, sm_90).
// Lane 8 m + r gives the address of row r of matrix m (16 bytes, 16-byte aligned); lane l holds in
// register m the elements (row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1) of matrix m.
// All 32 lanes call it; it orders nothing.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The same with every matrix transposed: lane l holds in register m the elements (rows 2 (l % 4)
// and 2 (l % 4) + 1, column l / 4) of matrix m.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1,
                                                  uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

}  // namespace jaxflash::ptx
