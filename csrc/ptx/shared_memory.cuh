// Reads and writes of shared memory by address, where pointer arithmetic would cost instructions.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

// Address of a shared-memory object in the shared window, as PTX instructions take it.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ld.shared.f32 (PTX ISA 1.0). Any thread; orders nothing.
__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// ld.shared.v2.f32 (PTX ISA 1.0), 8-byte aligned. Any thread; orders nothing.
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
  return value;
}

// st.shared (PTX ISA 1.0) of two adjacent elements, aligned to both. Any thread; orders nothing.
__device__ __forceinline__ void store_shared_pair(uint32_t address, uint32_t pair) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(pair) : "memory");
}
__device__ __forceinline__ void store_shared_pair(uint32_t address, float2 pair) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(pair.x), "f"(pair.y)
               : "memory");
}

}  // namespace jaxflash::ptx
