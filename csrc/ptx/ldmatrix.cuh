// ldmatrix: 8x8 matrices of 16-bit elements from shared memory into the fragments of mma.sync.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

// ldmatrix.sync.aligned.m8n8.x4.shared.b16 (PTX ISA 6.5, sm_75).
// Lane 8 m + r gives the address of row r of matrix m (16 bytes, 16-byte aligned); lane l receives
// in registers[m] the elements (row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1) of matrix m.
// All 32 lanes call it; it orders nothing.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&registers)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// The same with every matrix transposed: lane l receives in registers[m] the elements (rows
// 2 (l % 4) and 2 (l % 4) + 1, column l / 4) of matrix m.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t address, uint32_t (&registers)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

}  // namespace jaxflash::ptx
