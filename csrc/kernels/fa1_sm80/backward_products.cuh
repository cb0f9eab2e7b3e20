// The products of one step of the FlashAttention-1 backward, and what turns two of them into P and
// dS. A warp has its own columns of S, P, dP and dS, and 16 rows of dQ.
#pragma once

#include "device/dropout.cuh"
#include "kernels/fa1_sm80/config.h"
#include "kernels/fa1_sm80/row_tiles.cuh"
#include "mma/multiply.cuh"
#include "ptx/math.cuh"
#include "ptx/reduce.cuh"

namespace jaxflash::fa1_sm80 {

template <class Config>
using StepTile = Tile16<Config::kBlockQ, Config::kHeadDim>;  // q or dout
template <class Config>
using StepScores = mma::Accumulator<Config::kChunkTiles, Config::kScoreTiles>;
template <class Config>
using WarpGradient = mma::Accumulator<1, Config::kGradientTiles>;  // 16 columns x head dim

// S = Q K^T or dP = dO V^T of this warp's columns.
template <class Config>
__device__ __forceinline__ void compute_scores(
    const StepTile<Config>& rows, const Tile16<Config::kBlockKV, Config::kHeadDim>& keys, int row,
    int warp_column, int lane_idx, StepScores<Config>* scores) {
  scores->clear();
#pragma unroll
  for (int step = 0; step < Config::kHeadDim / 16; ++step) {
    uint32_t b[4];
    keys.load_b(warp_column, 16 * step, lane_idx, b);
#pragma unroll
    for (int i = 0; i < Config::kChunkTiles; ++i) {
      uint32_t a[4];
      rows.load_a(row + 16 * i, 16 * step, lane_idx, a);
      mma::multiply<typename Config::Element>(scores->values[i][0], a, b[0], b[1]);
      mma::multiply<typename Config::Element>(scores->values[i][1], a, b[2], b[3]);
    }
  }
}

// Brings Q K^T to log2 units and hides what masks hide.
template <class Config>
__device__ __forceinline__ void finish_scores(const AttentionParams& params, const Visibility& see,
                                              int first_row, int first_key, bool is_partial,
                                              int lane_idx, StepScores<Config>* scores) {
  const float scale = params.softmax_scale * device::kLog2E;
#pragma unroll
  for (int i = 0; i < Config::kChunkTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores->values[i][j][e] *= scale;
    }
  }
  if (!is_partial) return;
#pragma unroll
  for (int i = 0; i < Config::kChunkTiles; ++i) {
    hide<Config::kIsGeneral>(see, first_row + 16 * i, first_key, lane_idx, scores->values[i]);
  }
}

// p: logits -> P, dropped where dropout says; ds: dO V^T -> dS.
template <class Config>
__device__ __forceinline__ void compute_gradient(const device::DropoutStream& dropout,
                                                 int first_row, int first_key,
                                                 const RowStatistics* rows, int lane_idx,
                                                 StepScores<Config>* p, StepScores<Config>* ds) {
  const bool has_dropout = Config::kIsGeneral && dropout.threshold > 0;
#pragma unroll
  for (int r = 0; r < 2 * Config::kChunkTiles; ++r) {
    const int row = r / 2 * 16 + r % 2 * 8 + lane_idx / 4;
    const RowStatistics statistics = rows[row];
    uint32_t words[4];
    if (has_dropout) {  // of 32 columns, this warp's 16 among them
      device::draw_words(dropout, first_row + row, first_key & ~31, lane_idx, words);
    }
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        float* score = &p->values[r / 2][j][r % 2 * 2 + parity];
        float* dscore = &ds->values[r / 2][j][r % 2 * 2 + parity];
        const float weight = ptx::exp2_approx(*score - statistics.lse_log2);
        float keep = 1.0f;
        if (has_dropout) {
          const uint32_t word = first_key % 32 == 0 ? words[j] : words[2 + j];
          keep = device::is_kept(dropout, word, parity) ? dropout.scale : 0.0f;
        }
        *score = weight * keep;
        *dscore = weight * (*dscore * keep - statistics.delta);
      }
    }
  }
}

template <class Config>
__device__ __forceinline__ void store_scores(const StepScores<Config>& scores, int row,
                                             int warp_column, int lane_idx,
                                             Tile16<Config::kBlockQ, Config::kBlockKV>* tile) {
#pragma unroll
  for (int i = 0; i < Config::kChunkTiles; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = scores.values[i][j] + 2 * half;
        tile->store_pair(row + 16 * i, warp_column + 8 * j, half, lane_idx,
                         ptx::pack<typename Config::Element>(pair[0], pair[1]));
      }
    }
  }
}

// dV += P^T dO or dK += dS^T Q of this warp's columns.
template <class Config>
__device__ __forceinline__ void accumulate(const Tile16<Config::kBlockQ, Config::kBlockKV>& scores,
                                           const StepTile<Config>& rows, int warp_column,
                                           int lane_idx, WarpGradient<Config>* gradient) {
#pragma unroll
  for (int i = 0; i < Config::kTilesM; ++i) {
    uint32_t a[4];
    scores.load_a_transposed(16 * i, warp_column, lane_idx, a);
#pragma unroll
    for (int pair = 0; pair < Config::kGradientTiles / 2; ++pair) {
      uint32_t b[4];
      rows.load_b_transposed(16 * i, 16 * pair, lane_idx, b);
      mma::multiply<typename Config::Element>(gradient->values[0][2 * pair], a, b[0], b[1]);
      mma::multiply<typename Config::Element>(gradient->values[0][2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// dQ += dS K over all columns of the block, of 16 rows and kWarpColumnsDQ features.
template <class Config>
__device__ __forceinline__ void add_query_gradient(
    const Tile16<Config::kBlockQ, Config::kBlockKV>& ds,
    const Tile16<Config::kBlockKV, Config::kHeadDim>& keys, int row, int feature, int lane_idx,
    float (&dq)[Config::kTilesDQ][4]) {
#pragma unroll
  for (int k = 0; k < Config::kBlockKV; k += 16) {
    uint32_t a[4];
    ds.load_a(row, k, lane_idx, a);
#pragma unroll
    for (int pair = 0; pair < Config::kTilesDQ / 2; ++pair) {
      uint32_t b[4];
      keys.load_b_transposed(k, feature + 16 * pair, lane_idx, b);
      mma::multiply<typename Config::Element>(dq[2 * pair], a, b[0], b[1]);
      mma::multiply<typename Config::Element>(dq[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void add_atomically(float* sums, const float (&values)[4]) {
  if constexpr (ptx::kHasVectorReduction) {
    ptx::reduce_add_v4(sums, values);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) ptx::reduce_add(sums + e, values[e]);
  }
}

}  // namespace jaxflash::fa1_sm80
