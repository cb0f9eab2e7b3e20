// The soft cap of a logit and its derivative from two approximate instructions.
#pragma once

#include "device/visibility.cuh"
#include "ptx/math.cuh"

namespace jaxflash::device {

struct SoftCapped {
  float logit;  // cap tanh(x / cap)
  float slope;  // its derivative, 1 - tanh^2
};

// Caps x = softmax_scale * score; softmax_scale > 0.
//
// With e = exp(-2 |x / cap|): tanh = (1 - e) / (1 + e) and 1 - tanh^2 = 4 e / (1 + e)^2, which is
// right where tanh itself rounds to 1. The difference 1 - e has an absolute error of about 2^-22,
// so the logit one of 2^-22 cap: for caps up to kMaxSmallCap that is no more than the rounding of P
// to 16 bits. Larger ones (kIsLarge) take four terms of the series near 0, and have a relative
// error below 1e-6.
class SoftCap {
 public:
  static constexpr float kMaxSmallCap = 512.0f;

  __device__ __forceinline__ SoftCap(float softmax_scale, float cap)
      : cap_(cap), per_score_(softmax_scale / cap) {}

  template <bool kIsLarge>
  __device__ __forceinline__ SoftCapped of(float score) const {
    const float e = ptx::exp2_approx(fabsf(score) * (-2.0f * kLog2E * per_score_));
    const float r = ptx::reciprocal_approx(1.0f + e);
    float tanh = copysignf((1.0f - e) * r, score);
    if constexpr (kIsLarge) {
      const float y = score * per_score_, square = y * y;
      const float series = fmaf(
          fmaf(fmaf(-17.0f / 315.0f, square, 2.0f / 15.0f), square, -1.0f / 3.0f), square, 1.0f);
      if (fabsf(y) < 0.25f) tanh = y * series;
    }
    return {cap_ * tanh, 4.0f * (e * r) * r};
  }

 private:
  float cap_, per_score_;
};

// tanh as a quotient of polynomials in y^2, fitted for the least largest relative error on
// [0, 8.6], where it arrives at 1. Relative error below 4.5e-7 as evaluated here
// (tests/test_soft_cap.py). One approximate instruction, where exponential and reciprocal are two:
// those are scarce beside a softmax.
__device__ __forceinline__ float tanh_quotient(float y) {
  constexpr float kAbove[] = {0.99999994f,    0.129438579f,   2.94733606e-3f,
                              9.51249058e-6f, -1.3527286e-8f, 2.02055941e-11f};
  constexpr float kBelow[] = {1.0f, 0.462771595f, 0.0238716807f, 2.31789483e-4f};
  y = ptx::clamp_or_nan(y, -8.6f, 8.6f);
  const float square = y * y;
  float above = kAbove[5], below = kBelow[3];
#pragma unroll
  for (int i = 4; i >= 0; --i) above = fmaf(above, square, kAbove[i]);
#pragma unroll
  for (int i = 2; i >= 0; --i) below = fmaf(below, square, kBelow[i]);
  return y * above * ptx::reciprocal_approx(below);
}

}  // namespace jaxflash::device
