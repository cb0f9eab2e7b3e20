// Single instructions that C++ has no name for: exp2, reciprocal, clamp and the rounding of two
// floats into a pair.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxflash::ptx {

// ex2.approx.ftz.f32 (PTX ISA 5.0): 2^x, relative error 2^-22; -inf gives 0. Any thread.
__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// rcp.approx.ftz.f32 (PTX ISA 1.4): 1 / x, within 1 ulp; inf gives 0. Any thread.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// {min, max}.NaN.f32 (PTX ISA 7.0, sm_80): x brought into [low, high]; NaN stays NaN. Any thread.
__device__ __forceinline__ float clamp_or_nan(float x, float low, float high) {
  float result;
  asm("{\n.reg .f32 raised;\n"
      "max.NaN.f32 raised, %1, %2;\n"
      "min.NaN.f32 %0, raised, %3;\n}"
      : "=f"(result)
      : "f"(x), "f"(low), "f"(high));
  return result;
}

// Two adjacent elements of a row: one register of 16-bit elements, two of floats.
template <class Element>
using Pair = std::conditional_t<sizeof(Element) == 2, uint32_t, float2>;

// cvt.rn.{bf16x2, f16x2}.f32 (PTX ISA 7.0, sm_80): rounds two floats to nearest; `low` lands in the
// low half, which is the lower column of a fragment. Floats stay as they are. Any thread.
template <class Element>
__device__ __forceinline__ Pair<Element> pack(float low, float high);

template <>
__device__ __forceinline__ float2 pack<float>(float low, float high) {
  return make_float2(low, high);
}

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

// The inverse of pack: {low, high}. Any thread.
template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The same value, unknown to the compiler: else it computes the addresses of every copy and
// fragment before the loop, runs out of registers and spills them.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace jaxflash::ptx
