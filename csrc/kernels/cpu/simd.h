// Vectors of the compiler's vector extension and the two functions attention needs on them.
//
// The extension rather than intrinsics: the same source serves SSE2, AVX2, AVX-512 and NEON.
// Everything lives in the instruction set's own namespace (see kernels.h); std:: templates are
// avoided in these headers for the same reason.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cpu/config.h"

namespace jaxflash::cpu::JF_CPU_ISA {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kPanelVectors = kPanelLanes / kLanes;
constexpr float kInfinity = __builtin_inff();

using Vector = float __attribute__((vector_size(4 * kLanes)));
using IntVector = int32_t __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* source) {
  Vector result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

inline void store(float* destination, Vector value) {
  __builtin_memcpy(destination, &value, sizeof(value));
}

// x - 0 keeps every x, negative zero included, and folds away.
inline Vector splat(float x) { return x - Vector{}; }

inline IntVector bits_of(Vector x) { return (IntVector)x; }
inline Vector from_bits(IntVector x) { return (Vector)x; }

// Returns b where a is NaN.
inline Vector max_ignoring_nan(Vector a, Vector b) { return a > b ? a : b; }

// Natural exponential: relative error below 1.5 ulp on [-87.33, 88.37], 0 below (results that
// would be subnormal included), +inf above; NaN stays NaN.
// Cody-Waite reduction x = n * ln2 + r and a degree-7 polynomial on |r| <= ln2 / 2.
inline Vector exp(Vector x) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: the sum's low bits hold round(x)
  constexpr float kSmallest = -87.33654f, kLargest = 88.37f;
  const Vector shifted = x * kLog2E + kRoundingShift;
  const Vector n = shifted - kRoundingShift;
  const Vector r = (x - n * kLn2High) - n * kLn2Low;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  const Vector power = from_bits((bits_of(shifted) << 23) + (127 << 23));
  Vector result = p * power;
  result = x < kSmallest ? Vector{} : result;
  return x > kLargest ? splat(kInfinity) : result;
}

// Hyperbolic tangent, a few ulp of relative error everywhere; saturates to +-1, NaN stays NaN.
// Near 0 a polynomial keeps the relative error that 1 - 2 / (exp(2x) + 1) would lose.
inline Vector tanh(Vector x) {
  const IntVector sign = bits_of(x) & INT32_MIN;
  const Vector magnitude = from_bits(bits_of(x) & INT32_MAX);
  const Vector square = x * x;
  Vector p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vector small = (p * square) * x + x;
  const Vector large = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return magnitude < 0.625f ? small : from_bits(bits_of(large) | sign);
}

}  // namespace jaxflash::cpu::JF_CPU_ISA
