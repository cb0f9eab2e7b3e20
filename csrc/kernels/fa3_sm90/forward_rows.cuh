// The 64 query rows of one consumer warpgroup in the FlashAttention-3 forward: their scores,
// softmax reference, denominator and unnormalised output, all in registers.
//
// A lane holds two rows (r = 0, 1; ownership: ptx/wgmma.cuh) and a quarter of each. The reference
// of a row is what its logits are taken relative to, P = 2^(logit - reference), in log2 units. Any
// reference near the row maximum gives the same result, so it is lazy: the exact maximum in the
// blocks that need a mask and in a tile's first, and afterwards no maximum is taken at all. The row
// sums, needed anyway, tell when a row's reference has fallen behind:
//   - a lane's sum of one block reaches kGrown: the row's reference, P, l and O move by a power of
//     two (settle),
//   - it reaches kOverflown or is NaN: the row's scores of the block are computed once more, and
//     its exact maximum is taken (redo).
// What happens to a row depends on its own visible logits alone, never on its neighbours': a result
// does not change, to the bit, with keys its row may not see. The reference never exceeds the row
// maximum by more than log2 of a block's keys, so nothing underflows that should not, and P <
// kGrown < 65504, which float16 can hold.
#pragma once

#include "device/soft_cap.cuh"
#include "device/visibility.cuh"
#include "kernels/fa3_sm90/config.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"

namespace jaxflash::fa3_sm90 {

using device::kInfinity;

constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr float kGrown = 4096.0f;
constexpr float kOverflown = 1e37f;

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

template <class Config>
struct Rows {
  using Element = typename Config::Element;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  static constexpr int kBlockKV = Config::kBlockKV;

  float scores[kBlockKV / 2];
  uint32_t probabilities[kBlockKV / 16][4];  // of the block before, operand `a` of the next product
  float output[kHeadDimV / 2];               // unnormalised
  float reference[2];                        // log2 units, the same in a quad; -inf = no key yet
  float row_sum[2], block_sum[2];            // this lane's share
  float rescale[2];                          // brings O and l to the reference just taken
  bool is_overflown[2];                      // of the block just settled

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      reference[r] = -kInfinity;
      row_sum[r] = 0.0f;
    }
  }

  // Hides the keys that the lane's rows row and row + 8 do not see; `key` is the block's first.
  __device__ __forceinline__ void hide(const device::Window& see, int row, int key, int lane_idx) {
    const int column = key + 2 * (lane_idx % 4);  // of scores[0]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int end = min(see.kv_len, row + 8 * r + see.window_high + 1) - column;
#pragma unroll
      for (int i = 0; i < kBlockKV / 4; ++i) {
        if (i / 2 * 8 + i % 2 >= end) scores[i / 2 * 4 + 2 * r + i % 2] = -kInfinity;
      }
    }
    if (see.window_low == -device::kFar) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = row + 8 * r + see.window_low - column;
#pragma unroll
      for (int i = 0; i < kBlockKV / 4; ++i) {
        if (i / 2 * 8 + i % 2 < begin) scores[i / 2 * 4 + 2 * r + i % 2] = -kInfinity;
      }
    }
  }

  // The same by bits (find_visible).
  __device__ __forceinline__ void hide(const uint32_t (&visible)[2]) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) {
      const int n = i / 4 * 2 + i % 2;  // the column's bit
      if ((visible[i / 2 % 2] >> n & 1) == 0) scores[i] = -kInfinity;
    }
  }

  // scores = soft-capped logits in units of the cap; to_caps: from scores to those units.
  __device__ __forceinline__ void cap(float to_caps) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) scores[i] = device::tanh_quotient(scores[i] * to_caps);
  }

  // reference = max(reference, row maximum of the scores).
  __device__ __forceinline__ void take_exact_reference(float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -kInfinity;
#pragma unroll
      for (int j = 0; j < kBlockKV / 8; ++j) {
        top = fmaxf(top, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      }
      top = fmaxf(reference[r], quad_max(top) * scale_log2);
      rescale[r] = ptx::exp2_approx(reference[r] - (top == -kInfinity ? 0.0f : top));
      reference[r] = top;
    }
  }

  // scores = P, block_sum = this lane's share of their sums. A row that has seen no key yet has
  // scores of -inf alone; 0 stands in for its reference so that no NaN arises.
  __device__ __forceinline__ void exponentiate(float scale_log2) {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = reference[r] == -kInfinity ? 0.0f : reference[r];
      block_sum[r] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) {
      const int r = i / 2 % 2;
      scores[i] = ptx::exp2_approx(fmaf(scores[i], scale_log2, -shift[r]));
      block_sum[r] += scores[i];
    }
  }

  // Brings the references that have fallen behind up to date. Returns whether any row of the warp
  // has overflown: those rows are left out of l and O until redo. O must not be in a product.
  __device__ __forceinline__ bool settle() {
    if (!__any_sync(kAllLanes, !(block_sum[0] < kGrown && block_sum[1] < kGrown))) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = quad_max(block_sum[r] < kOverflown ? block_sum[r] : kInfinity);
      is_overflown[r] = top == kInfinity;
      rescale[r] = 1.0f;
      if (is_overflown[r]) {
        block_sum[r] = 0.0f;
      } else if (top >= kGrown) {
        const float raised = reference[r] + ((__float_as_int(top) >> 23) - 127);
        rescale[r] = ptx::exp2_approx(reference[r] - raised);  // as reference was rounded
        reference[r] = raised;
        block_sum[r] *= rescale[r];
      }
    }
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) scores[i] *= rescale[i / 2 % 2];
    rescale_output();
    return __any_sync(kAllLanes, is_overflown[0] || is_overflown[1]);
  }

  // After settle and finish_block: takes the exact reference in the rows that have overflown. The
  // scores hold the block's logits again (recompute_scores).
  __device__ __forceinline__ void redo(float scale_log2) {
    const float before[2] = {reference[0], reference[1]};
    take_exact_reference(scale_log2);
    exponentiate(scale_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (is_overflown[r]) continue;
      reference[r] = before[r];
      rescale[r] = 1.0f;
      block_sum[r] = 0.0f;
    }
    rescale_output();
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_overflown[i % 2]) probabilities[k][i] = packed(k, i);
      }
    }
  }

  __device__ __forceinline__ void rescale_output() {
    row_sum[0] *= rescale[0];
    row_sum[1] *= rescale[1];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) output[i] *= rescale[i / 2 % 2];
  }

  // Adds the block to the denominator and rounds P for the product with V.
  __device__ __forceinline__ void finish_block() {
    row_sum[0] += block_sum[0];
    row_sum[1] += block_sum[1];
#pragma unroll
    for (int k = 0; k < kBlockKV / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        probabilities[k][i] = packed(k, i);
      }
    }
  }

  // Register i (row i % 2) of the fragment `a` that holds P of keys 16 k ...
  __device__ __forceinline__ uint32_t packed(int k, int i) const {
    return ptx::pack<Element>(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1]);
  }

  // The scores of this warp's 16 rows from `queries` and of the keys from `keys` on, by mma.sync.
  // NOTE: reads the keys from global memory: their place in shared memory has been given back.
  __device__ __forceinline__ void recompute_scores(const typename Config::QueryTile& queries,
                                                   int warp_idx, int lane_idx, const void* keys,
                                                   int64_t key_stride, int features) {
#pragma unroll
    for (int i = 0; i < kBlockKV / 2; ++i) scores[i] = 0.0f;
    const Element* lane_keys =
        static_cast<const Element*>(keys) + lane_idx / 4 * key_stride + 2 * (lane_idx % 4);
#pragma unroll 1
    for (int feature = 0; feature < features; feature += 16) {
      uint32_t a[4];
      ptx::ldmatrix_x4(
          queries.chunk_address(16 * warp_idx + lane_idx % 16, feature / 8 + lane_idx / 16), a);
      const bool has_high = feature + 8 < features;  // features is a multiple of 8
      const Element* key = lane_keys + feature;
#pragma unroll
      for (int j = 0; j < kBlockKV / 8; ++j, key += 8 * key_stride) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(key);
        float d[4] = {scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]};
        ptx::mma_m16n8k16<Element>(d, a, pairs[0], has_high ? pairs[4] : 0);
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[4 * j + e] = d[e];
      }
    }
  }
};

}  // namespace jaxflash::fa3_sm90
