// The five products of one step of the backward pass, from shared memory into registers.
//
// All operands of a step lie in shared memory as they lie in global memory, rows of head dim
// elements; ldmatrix transposes where a product wants the other order. S^T and dP^T are computed
// transposed, keys as rows, because a warp then holds P^T and dS^T in the order in which the
// products for dV and dK read their left operand.
#pragma once

#include "kernels/fa2_sm80/backward_config.h"
#include "mma/fragment.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
using ScoreFragments = mma::Accumulator<2, Config::kChunkQ / 8>;  // 32 keys x kChunkQ queries
template <class Config>
using KvGradient = mma::Accumulator<2, Config::kWarpColumns / 8>;  // 32 keys x kWarpColumns
template <class Config>
using QueryGradient = mma::Accumulator<2, Config::kPartColumnsDQ / 8>;  // 32 queries x columns

// The same rows of a 32-row left operand times both fragments b of one load.
template <class Element, int kTilesN>
__device__ __forceinline__ void multiply_pair(mma::Accumulator<2, kTilesN>& d,
                                              const uint32_t (&a)[2][4], const uint32_t (&b)[4],
                                              int pair) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ptx::mma_m16n8k16<Element>(d.values[i][2 * pair], a[i], b[0], b[1]);
    ptx::mma_m16n8k16<Element>(d.values[i][2 * pair + 1], a[i], b[2], b[3]);
  }
}

// S^T = K Q^T or dP^T = V dout^T: keys row.. of the owned tile, queries column.. of the streamed.
template <class Config, class Element>
__device__ __forceinline__ void compute_scores(
    const mma::SharedTile<Config::kBlockKV, Config::kHeadDim>& owned,
    const mma::SharedTile<Config::kBlockQ, Config::kHeadDim>& streamed, int row, int column,
    int lane_idx, ScoreFragments<Config>& scores) {
  scores.clear();
#pragma unroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) owned.load_a(row + 16 * i, k, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kChunkQ / 16; ++pair) {
      uint32_t b[4];
      streamed.load_b(column + 16 * pair, k, lane_idx, b);
      multiply_pair<Element>(scores, a, b, pair);
    }
  }
}

// dV += P^T dout or dK += dS^T Q over the queries of one chunk, the left operand in registers.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_kv(
    const ScoreFragments<Config>& left,
    const mma::SharedTile<Config::kBlockQ, Config::kHeadDim>& right, int chunk_row, int column,
    int lane_idx, KvGradient<Config>& gradient) {
#pragma unroll
  for (int k = 0; k < Config::kChunkQ; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) left.template as_a<Element>(i, k / 16, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kWarpColumns / 16; ++pair) {
      uint32_t b[4];
      right.load_b_transposed(chunk_row + k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(gradient, a, b, pair);
    }
  }
}

// The same for the chunk of another warp with the same keys, which left it in shared memory as
// [keys, queries]; row is the first key of both warps.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_kv(
    const mma::SharedTile<Config::kBlockKV, Config::kBlockQ>& left,
    const mma::SharedTile<Config::kBlockQ, Config::kHeadDim>& right, int row, int chunk_row,
    int column, int lane_idx, KvGradient<Config>& gradient) {
#pragma unroll
  for (int k = 0; k < Config::kChunkQ; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) left.load_a(row + 16 * i, chunk_row + k, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kWarpColumns / 16; ++pair) {
      uint32_t b[4];
      right.load_b_transposed(chunk_row + k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(gradient, a, b, pair);
    }
  }
}

// dQ = dS K over all keys of the tile: queries row.., head dim column..
template <class Config, class Element>
__device__ __forceinline__ void compute_dq(
    const mma::SharedTile<Config::kBlockKV, Config::kBlockQ>& dscores,
    const mma::SharedTile<Config::kBlockKV, Config::kHeadDim>& keys, int row, int column,
    int lane_idx, QueryGradient<Config>& dq) {
  dq.clear();
#pragma unroll
  for (int k = 0; k < Config::kBlockKV; k += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) dscores.load_a_transposed(k, row + 16 * i, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kPartColumnsDQ / 16; ++pair) {
      uint32_t b[4];
      keys.load_b_transposed(k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(dq, a, b, pair);
    }
  }
}

// Writes a warp's fragments, rounded, to [keys row.., queries column..].
template <class Config, class Element>
__device__ __forceinline__ void store_scores(
    const ScoreFragments<Config>& scores, int row, int column, int lane_idx,
    mma::SharedTile<Config::kBlockKV, Config::kBlockQ>& tile) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kChunkQ / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = scores.values[i][j] + 2 * half;
        tile.store_pair(row + 16 * i, column + 8 * j, half, lane_idx,
                        ptx::pack<Element>(pair[0], pair[1]));
      }
    }
  }
}

// Writes a pair of adjacent elements of a row, as one word where rows start on 4 bytes.
template <class Element>
__device__ __forceinline__ void store_pair(float first, float second, int column, int num_columns,
                                           Element* row) {
  if (num_columns % 2 == 0) {
    if (column >= num_columns) return;
    *reinterpret_cast<uint32_t*>(row + column) = ptx::pack<Element>(first, second);
  } else {
    if (column < num_columns) row[column] = static_cast<Element>(first);
    if (column + 1 < num_columns) row[column + 1] = static_cast<Element>(second);
  }
}

// Writes a warp's accumulators times factor. destination: row 0 and column 0 of the CTA's tile,
// rows row_stride elements apart; row, column: first of the warp. What lies beyond num_rows and
// num_columns is not written.
template <class Element, int kTilesM, int kTilesN>
__device__ __forceinline__ void store_fragments(const mma::Accumulator<kTilesM, kTilesN>& tile,
                                                float factor, int row, int column, int num_rows,
                                                int64_t row_stride, int num_columns, int lane_idx,
                                                Element* destination) {
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * i + 8 * half + lane_idx / 4;
      if (r >= num_rows) continue;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const float* pair = tile.values[i][j] + 2 * half;
        store_pair(factor * pair[0], factor * pair[1], column + 8 * j + lane_idx % 4 * 2,
                   num_columns, destination + r * row_stride);
      }
    }
  }
}

}  // namespace jaxflash::fa2_sm80
