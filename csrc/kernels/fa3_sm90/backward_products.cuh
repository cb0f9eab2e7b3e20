// The five products of a step, issued and committed; the caller waits. One warpgroup, c of two.
#pragma once

#include "kernels/fa3_sm90/backward_config.h"
#include "ptx/wgmma.cuh"

namespace jaxflash::fa3_sm90 {

// Keys x queries, or features x queries: lane l of warp w holds in element 4 j + 2 r + e row
// 16 w + l / 4 + 8 r of the warpgroup's 64 and column 8 j + 2 (l % 4) + e (ptx/wgmma.cuh).
template <class Config>
using ScoreFragment = float[Config::kBlockQ / 2];
template <class Config>
using GradientFragment = float[Config::kHeadDim / 2];  // keys x features
template <class Config>
using QueryFragment = float[Config::kColumnsDQ / 2];  // features x queries
// P^T or dS^T as left operand of the products that sum over queries.
template <class Config>
using LeftOperand = uint32_t[Config::kBlockQ / 16][4];

// One 8 x 8 core for all rows of the left operand, one core of 8 queries each of the right.
using StatisticOperands = ptx::WgmmaOperands<0, (128 >> 4), false, false>;

// scores = X Y^T, X: this warpgroup's 64 rows of K or V, Y: all rows of a Q or dout tile. With
// kAddsStatistic the accumulator starts at what `selector` picks from the statistics.
template <class Config, bool kAddsStatistic, class TileX, class TileY>
__device__ __forceinline__ void issue_scores(const TileX& x, int c, const TileY& y,
                                             uint32_t selector, const StatisticColumns* statistics,
                                             ScoreFragment<Config>& scores) {
  using Element = typename Config::Element;
  const uint32_t a = x.k_major() + c * (64 * 128 >> 4), b = y.k_major();
  ptx::wgmma_pin(scores);
  ptx::wgmma_fence();
  if constexpr (kAddsStatistic) {
    // Both halves of the k step read the same columns; the selector's second half is zero.
    ptx::wgmma_ss<Element, StatisticOperands>(
        scores, selector, mma::descriptor_low(ptx::shared_address(statistics), 0), false);
  }
#pragma unroll
  for (int step = 0; step < TileX::kNumColumns / 16; ++step) {
    ptx::wgmma_ss<Element, mma::TileOperands<false, false>>(scores, a + TileX::k_major_step(step),
                                                            b + TileY::k_major_step(step),
                                                            kAddsStatistic || step > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_pin(scores);
}

// dV += P^T dout or dK += dS^T Q. `left` must stay as it is until the product is waited for.
template <class Config, class Tile, int kCount>
__device__ __forceinline__ void issue_gradient(LeftOperand<Config>& left, const Tile& right,
                                               float (&gradient)[kCount]) {
  const uint32_t b = right.mn_major();
  ptx::wgmma_pin(left);
  ptx::wgmma_pin(gradient);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockQ / 16; ++step) {
    ptx::wgmma_rs<typename Config::Element, mma::TileOperands<false, true>>(
        gradient, left[step], b + Tile::mn_major_step(step), true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_pin(gradient);
  ptx::wgmma_pin(left);
}

// dQ^T = K^T dS^T over all keys: this warpgroup's half of the features, or of the queries.
template <class Config>
__device__ __forceinline__ void issue_dq(
    const typename Config::TileKV& k, int c,
    const mma::WgmmaTile<Config::kBlockQ, Config::kBlockKV>& dscores, QueryFragment<Config>& dq) {
  using Scores = mma::WgmmaTile<Config::kBlockQ, Config::kBlockKV>;
  uint32_t a = k.mn_major(), b = dscores.k_major();
  if constexpr (Config::kSlabs == 2) {
    a += c * (Config::TileKV::kSlabBytes >> 4);
  } else {
    b += c * (Config::kColumnsDQ * 128 >> 4);
  }
  ptx::wgmma_pin(dq);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kBlockKV / 16; ++step) {
    ptx::wgmma_ss<typename Config::Element, mma::TileOperands<true, false>>(
        dq, a + Config::TileKV::mn_major_step(step), b + Scores::k_major_step(step), step > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_pin(dq);
}

}  // namespace jaxflash::fa3_sm90
