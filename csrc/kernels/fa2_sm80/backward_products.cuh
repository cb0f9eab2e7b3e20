// The five products of one step of the backward pass, from shared memory into registers.
//
// All operands of a step lie in shared memory as they lie in global memory, rows of head dim
// elements; ldmatrix transposes where a product wants the other order. S^T and dP^T are computed
// transposed, keys as rows, because a warp then holds P^T and dS^T in the order in which the
// products for dV and dK read their left operand.
#pragma once

#include "kernels/fa2_sm80/backward_config.h"
#include "mma/multiply.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
using ScoreFragments = mma::Accumulator<Config::kTilesM, Config::kChunkQ / 8>;  // keys x queries
template <class Config>
using KvGradient = mma::Accumulator<Config::kTilesM, Config::kWarpColumns / 8>;  // keys x columns
template <class Config>
using QueryGradient = mma::Accumulator<2, Config::kPartColumnsDQ / 8>;  // 32 queries x columns

// All rows of the left operand times both fragments b of one load.
template <class Element, int kTilesM, int kTilesN>
__device__ __forceinline__ void multiply_pair(mma::Accumulator<kTilesM, kTilesN>& d,
                                              const mma::Fragment<Element> (&a)[kTilesM],
                                              const mma::Fragment<Element>& b, int pair) {
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
    mma::multiply<Element>(d.values[i][2 * pair], a[i], b[0], b[1]);
    mma::multiply<Element>(d.values[i][2 * pair + 1], a[i], b[2], b[3]);
  }
}

// S^T = K Q^T or dP^T = V dout^T: keys row.. of the owned tile, queries column.. of the streamed.
template <class Config, class Element>
__device__ __forceinline__ void compute_scores(const typename Config::KvTile& owned,
                                               const typename Config::QTile& streamed, int row,
                                               int column, int lane_idx,
                                               ScoreFragments<Config>& scores) {
  scores.clear();
#pragma unroll Config::kUnroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    mma::Fragment<Element> a[Config::kTilesM];
#pragma unroll
    for (int i = 0; i < Config::kTilesM; ++i) owned.load_a(row + 16 * i, k, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kChunkQ / 16; ++pair) {
      mma::Fragment<Element> b;
      streamed.load_b(column + 16 * pair, k, lane_idx, b);
      multiply_pair<Element>(scores, a, b, pair);
    }
  }
}

// dV += P^T dout or dK += dS^T Q over the queries of one chunk, the left operand in registers.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_kv(const ScoreFragments<Config>& left,
                                              const typename Config::QTile& right, int chunk_row,
                                              int column, int lane_idx,
                                              KvGradient<Config>& gradient) {
#pragma unroll
  for (int k = 0; k < Config::kChunkQ; k += 16) {
    mma::Fragment<Element> a[Config::kTilesM];
#pragma unroll
    for (int i = 0; i < Config::kTilesM; ++i) left.template as_a<Element>(i, k / 16, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kWarpColumns / 16; ++pair) {
      mma::Fragment<Element> b;
      right.load_b_transposed(chunk_row + k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(gradient, a, b, pair);
    }
  }
}

// The same for the chunk of another warp with the same keys, which left it in shared memory as
// [keys, queries]; row is the first key of both warps.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_kv(const typename Config::ScoreTile& left,
                                              const typename Config::QTile& right, int row,
                                              int chunk_row, int column, int lane_idx,
                                              KvGradient<Config>& gradient) {
#pragma unroll
  for (int k = 0; k < Config::kChunkQ; k += 16) {
    mma::Fragment<Element> a[Config::kTilesM];
#pragma unroll
    for (int i = 0; i < Config::kTilesM; ++i)
      left.load_a(row + 16 * i, chunk_row + k, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < Config::kWarpColumns / 16; ++pair) {
      mma::Fragment<Element> b;
      right.load_b_transposed(chunk_row + k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(gradient, a, b, pair);
    }
  }
}

// dQ = dS K over all keys of the tile: queries row.., head dim column..
template <class Config, class Element, int kTilesN>
__device__ __forceinline__ void compute_dq(const typename Config::ScoreTile& dscores,
                                           const typename Config::KvTile& keys, int row, int column,
                                           int lane_idx, mma::Accumulator<2, kTilesN>& dq) {
  dq.clear();
#pragma unroll
  for (int k = 0; k < Config::kBlockKV; k += 16) {
    mma::Fragment<Element> a[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) dscores.load_a_transposed(k, row + 16 * i, lane_idx, a[i]);
#pragma unroll
    for (int pair = 0; pair < kTilesN / 2; ++pair) {
      mma::Fragment<Element> b;
      keys.load_b_transposed(k, column + 16 * pair, lane_idx, b);
      multiply_pair<Element>(dq, a, b, pair);
    }
  }
}

// Writes a warp's fragments, rounded, to [keys row.., queries column..].
template <class Config, class Element>
__device__ __forceinline__ void store_scores(const ScoreFragments<Config>& scores, int row,
                                             int column, int lane_idx,
                                             typename Config::ScoreTile& tile) {
#pragma unroll
  for (int i = 0; i < Config::kTilesM; ++i) {
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

// Writes a pair of adjacent elements of a row, in one go where rows start at whole pairs.
template <class Element>
__device__ __forceinline__ void store_pair(float first, float second, int column, int num_columns,
                                           Element* row) {
  if (num_columns % 2 == 0) {
    if (column >= num_columns) return;
    *reinterpret_cast<ptx::Pair<Element>*>(row + column) = ptx::pack<Element>(first, second);
  } else {
    if (column < num_columns) row[column] = static_cast<Element>(first);
    if (column + 1 < num_columns) row[column + 1] = static_cast<Element>(second);
  }
}

// words[n] of lane t of a quad becomes words[t] of its lane n. All 32 lanes call it.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane_idx) {
  const int t = lane_idx % 4;
  const auto pick = [](const uint32_t (&x)[4], int n) {
    const uint32_t low = n % 2 == 0 ? x[0] : x[1], high = n % 2 == 0 ? x[2] : x[3];
    return n < 2 ? low : high;
  };
  uint32_t received[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    received[step] = __shfl_xor_sync(0xFFFFFFFF, pick(words, t ^ step), step);
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) words[n] = pick(received, t ^ n);
}

// Writes 32 columns, from `column` on, of row `half` * 8 + lane / 4 of four fragments side by side,
// times factor: 16 bytes a lane where rows of 16-bit elements allow it, so that each request fills
// whole sectors; floats do so in pairs. row: of this lane; all 32 lanes call it.
template <class Element>
__device__ __forceinline__ void store_quad(const float (&fragments)[4][4], float factor, int half,
                                           int column, int num_columns, bool is_row_owned,
                                           int lane_idx, Element* row) {
  if constexpr (sizeof(Element) == 2) {
    if (num_columns % 8 == 0) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        words[n] = ptx::pack<Element>(factor * fragments[n][2 * half],
                                      factor * fragments[n][2 * half + 1]);
      }
      transpose_quad(words, lane_idx);
      const int first = column + 8 * (lane_idx % 4);
      if (is_row_owned && first < num_columns) {
        *reinterpret_cast<uint4*>(row + first) = make_uint4(words[0], words[1], words[2], words[3]);
      }
      return;
    }
  }
  if (!is_row_owned) return;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    store_pair(factor * fragments[n][2 * half], factor * fragments[n][2 * half + 1],
               column + 8 * n + lane_idx % 4 * 2, num_columns, row);
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
  static_assert(kTilesN % 4 == 0, "columns are written 32 at a time");
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 16 * i + 8 * half + lane_idx / 4;
#pragma unroll
      for (int j = 0; j < kTilesN; j += 4) {
        const float (&fragments)[4][4] =
            *reinterpret_cast<const float (*)[4][4]>(tile.values[i][j]);
        store_quad(fragments, factor, half, column + 8 * j, num_columns, r < num_rows, lane_idx,
                   destination + r * row_stride);
      }
    }
  }
}

}  // namespace jaxflash::fa2_sm80
