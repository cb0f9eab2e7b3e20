// red: additions to global memory that return nothing and may be performed in any order.
#pragma once

#include <cstdint>

namespace jaxflash::ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
constexpr bool kHasVectorReduction = true;
#else
constexpr bool kHasVectorReduction = false;
#endif

// red.relaxed.gpu.global.add.v4.f32 (PTX ISA 8.1, sm_90): four sums at 16-byte aligned
// `destination`, each atomic for itself. Any thread may call it; it orders nothing.
__device__ __forceinline__ void reduce_add_v4(float* destination, const float (&values)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(destination),
               "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
               : "memory");
#endif
}

// red.relaxed.gpu.global.add.f32 (PTX ISA 6.0): one sum. Any thread may call it.
__device__ __forceinline__ void reduce_add(float* destination, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(destination), "f"(value)
               : "memory");
}

}  // namespace jaxflash::ptx
