// Single instructions that C++ has no name for: exp2 and the packing of two floats into 32 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jaxflash::ptx {

// ex2.approx.ftz.f32 (PTX ISA 5.0): 2^x, relative error 2^-22; -inf gives 0. Any thread.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// cvt.rn.{bf16x2, f16x2}.f32 (PTX ISA 7.0, sm_80): rounds two floats to nearest; `low` lands in the
// low half, which is the lower column of a fragment. Any thread.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

}  // namespace jaxflash::ptx
