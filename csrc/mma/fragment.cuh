// Fragments of a warp's products: operands of 16 rows x 16 k and 16 k x 8 columns, accumulators of
// 16 rows x 8 columns (ownership: ptx/mma.cuh).
#pragma once

#include "ptx/math.cuh"

namespace jaxflash::mma {

// The pairs of a fragment `a`, or of two fragments `b` that are loaded together.
template <class Element>
using Fragment = ptx::Pair<Element>[4];

// values[i][j] is the d fragment of rows 16 i.. and columns 8 j..
template <int kTilesM, int kTilesN>
struct Accumulator {
  static constexpr int kNumTilesM = kTilesM;
  static constexpr int kNumTilesN = kTilesN;

  float values[kTilesM][kTilesN][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) values[i][j][e] = 0.0f;
      }
    }
  }

  // Columns 16 k.. of rows 16 i.., rounded to Element, as the fragment `a` of a following product:
  // the two d fragments side by side hold exactly the elements that `a` wants in each lane.
  template <class Element>
  __device__ __forceinline__ void as_a(int i, int k, Fragment<Element>& a) const {
    a[0] = ptx::pack<Element>(values[i][2 * k][0], values[i][2 * k][1]);
    a[1] = ptx::pack<Element>(values[i][2 * k][2], values[i][2 * k][3]);
    a[2] = ptx::pack<Element>(values[i][2 * k + 1][0], values[i][2 * k + 1][1]);
    a[3] = ptx::pack<Element>(values[i][2 * k + 1][2], values[i][2 * k + 1][3]);
  }
};

// Row of element e (0..3) of a d fragment inside its 16 rows, and its column inside its 8.
__device__ __forceinline__ int fragment_row(int lane_idx, int e) {
  return lane_idx / 4 + e / 2 * 8;
}
__device__ __forceinline__ int fragment_column(int lane_idx, int e) {
  return lane_idx % 4 * 2 + e % 2;
}

}  // namespace jaxflash::mma
