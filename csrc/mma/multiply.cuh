// One product of fragments: 16 rows x 16 k times 16 k x 8 columns, for every element type.
//
// Tensor cores have no float32, so a float x is split into high + low, two TF32 numbers of 11 bits
// that hold 22 of its 24, and a product becomes low high + high low + high high ("3xTF32"; what is
// left out is 2^-22 of it). Tensor cores truncate when they add to an accumulator, which over
// thousands of steps would add up to 1e-4; so each product starts from zero, and its sum is added
// to d by a rounded addition (the remedy of arXiv:2203.03341).
//
// A TF32 mma takes 8 k, k = t and t + 4 from lane t, where a fragment has pairs 2t, 2t + 1. A sum
// does not ask for an order: both operands give the first of a pair as k = t, the second as t + 4.
#pragma once

#include <type_traits>

#include "mma/fragment.cuh"
#include "ptx/mma.cuh"

namespace jaxflash::mma {

// x rounded to 11 bits, halves away from zero. Infinity stays; x - high is then NaN.
__device__ __forceinline__ float high_part(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xFFFFE000);
}

// The 8 k of two pairs of rows of `a`, or of one pair of `b`, split.
struct SplitA {
  float high[4], low[4];

  __device__ __forceinline__ SplitA(float2 upper, float2 lower)
      : high{high_part(upper.x), high_part(lower.x), high_part(upper.y), high_part(lower.y)},
        low{upper.x - high[0], lower.x - high[1], upper.y - high[2], lower.y - high[3]} {}
};
struct SplitB {
  float high[2], low[2];

  __device__ __forceinline__ explicit SplitB(float2 pair)
      : high{high_part(pair.x), high_part(pair.y)}, low{pair.x - high[0], pair.y - high[1]} {}
};

// d += a b. b0, b1: the two pairs of a fragment `b`. All 32 lanes call it.
template <class Element>
__device__ __forceinline__ void multiply(float (&d)[4], const Fragment<Element>& a,
                                         ptx::Pair<Element> b0, ptx::Pair<Element> b1) {
  if constexpr (std::is_same_v<Element, float>) {
    const SplitA left[2] = {{a[0], a[1]}, {a[2], a[3]}};
    const SplitB right[2] = {SplitB(b0), SplitB(b1)};
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      ptx::mma_m16n8k8_tf32(sum, left[k].low, right[k].high[0], right[k].high[1]);
      ptx::mma_m16n8k8_tf32(sum, left[k].high, right[k].low[0], right[k].low[1]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      ptx::mma_m16n8k8_tf32(sum, left[k].high, right[k].high[0], right[k].high[1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] += sum[e];
  } else {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }
}

}  // namespace jaxflash::mma
