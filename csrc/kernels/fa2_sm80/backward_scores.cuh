// P and dS of one step, in place of the products they come from.
//
//   x = softmax_scale q.k, soft-capped, plus bias; -inf where hidden
//   P = exp(x - lse)     dP = (dout . v) keep     dS = P (dP - delta) [times the soft cap's slope]
//
// The plain form knows lengths and window alone and folds log2(e) into the scale; the general form
// knows everything and works in natural units. A general instance takes it for tiles that are not
// full and for calls with adjusted pairs.
#pragma once

#include <cstdint>

#include "device/dropout_transposed.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/backward_products.cuh"
#include "kernels/fa2_sm80/backward_workspace.cuh"

namespace jaxflash::fa2_sm80 {

// Where a warp's fragments lie inside the sequence: first key (rows) and first query (columns).
struct FragmentOrigin {
  int key, query;
};

// Key and query of element e of fragment (i, j).
__device__ __forceinline__ int key_of(const FragmentOrigin& origin, int i, int lane_idx, int e) {
  return origin.key + 16 * i + mma::fragment_row(lane_idx, e);
}
__device__ __forceinline__ int query_of(const FragmentOrigin& origin, int j, int lane_idx, int e) {
  return origin.query + 8 * j + mma::fragment_column(lane_idx, e);
}

// statistic[c] of the two queries that this lane holds of fragment column j.
__device__ __forceinline__ float2 of_queries(const float* statistic, int j, int lane_idx) {
  return *reinterpret_cast<const float2*>(statistic + 8 * j + lane_idx % 4 * 2);
}

// A key sees an interval of queries, counted here from the lane's first.
template <class Config>
__device__ __forceinline__ void hide_outside_window(const device::Window& see,
                                                    const FragmentOrigin& origin, int lane_idx,
                                                    ScoreFragments<Config>& scores) {
  const int first_query = query_of(origin, 0, lane_idx, 0);
#pragma unroll
  for (int i = 0; i < Config::kTilesM; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = key_of(origin, i, lane_idx, 2 * half);
      const int begin = key - see.window_high - first_query;
      const int end =
          key < see.kv_len ? min(key - see.window_low, see.query_len - 1) + 1 - first_query : begin;
#pragma unroll
      for (int j = 0; j < Config::kChunkQ / 8; ++j) {
#pragma unroll
        for (int parity = 0; parity < 2; ++parity) {
          const int query = 8 * j + parity;
          if (query < begin || query >= end) {
            scores.values[i][j][2 * half + parity] = -device::kInfinity;
          }
        }
      }
    }
  }
}

// scores: q.k -> P; dscores: dout.v -> dS. The statistics begin at the origin's query.
template <class Config>
__device__ __forceinline__ void compute_gradient(float softmax_scale_log2, const float* lse_log2,
                                                 const float* delta, int lane_idx,
                                                 ScoreFragments<Config>& scores,
                                                 ScoreFragments<Config>& dscores) {
#pragma unroll
  for (int j = 0; j < Config::kChunkQ / 8; ++j) {
    const float2 row_lse = of_queries(lse_log2, j, lane_idx);
    const float2 row_delta = of_queries(delta, j, lane_idx);
#pragma unroll
    for (int i = 0; i < Config::kTilesM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x =
            fmaf(scores.values[i][j][e], softmax_scale_log2, -(e % 2 == 0 ? row_lse.x : row_lse.y));
        const float p = ptx::exp2_approx(x);
        scores.values[i][j][e] = p;
        dscores.values[i][j][e] =
            p * (dscores.values[i][j][e] - (e % 2 == 0 ? row_delta.x : row_delta.y));
      }
    }
  }
}

// The logarithm of a row's sum of exponentials. A bias can make it so large that one float32 is off
// by more than 1; then it has two terms.
struct RowLse {
  float high;      // natural; 0 where one term will do
  float low_log2;  // the rest, in the log2 domain; +inf for a row that takes no part

  // exp(x - lse)
  __device__ __forceinline__ float probability(float x) const {
    return ptx::exp2_approx(fmaf(x - high, device::kLog2E, -low_log2));
  }
};

// The rows of one head of a sequence. Places are formed anew for each row, which costs fewer
// registers than pointers.
struct LseRows {
  const BackwardParams* params;
  int batch, query_begin, head;

  __device__ __forceinline__ RowLse at(int query, float log2) const {
    const AttentionParams& attention = params->attention;
    if (attention.bias.data == nullptr || log2 == device::kInfinity) return {0.0f, log2};
    const int64_t row = (batch * attention.T + (query_begin + query)) * attention.N + head;
    return {params->lse[row], params->lse_low[row] * device::kLog2E};
  }
};

__device__ __forceinline__ LseRows make_lse_rows(const BackwardParams& params,
                                                 const device::SequenceTile& place, int head) {
  return {&params, place.batch, place.query_begin, head};
}

// Whether something acts on the pairs of full tiles too. (A bias makes every tile partial.)
__device__ __forceinline__ bool has_adjusted_pairs(const AttentionParams& params) {
  return params.logits_soft_cap > 0.0f || params.dropout_threshold > 0;
}

// What one pair of a query and a key contributes.
struct PairGradient {
  float score;   // P keep
  float dscore;  // dS, with the soft cap's slope: q and k act before it
  float dlogit;  // dS without it: the bias acts after it; exactly 0 for hidden pairs
};

// keep: dropout's factor. Masks and bias are consulted where is_partial.
__device__ __forceinline__ PairGradient pair_gradient(const AttentionParams& params,
                                                      const device::Visibility& see,
                                                      bool is_partial, int query, int key,
                                                      float keep, const RowLse& lse, float delta,
                                                      float qk, float dout_v) {
  float x = qk * params.softmax_scale, slope = 1.0f;
  if (params.logits_soft_cap > 0.0f) {
    const float t = tanhf(x / params.logits_soft_cap);
    x = params.logits_soft_cap * t;
    slope = 1.0f - t * t;
  }
  if (is_partial) x = device::adjust_logit(see, query, key, x);
  const float p = lse.probability(x);
  const float dlogit = p == 0.0f ? 0.0f : p * (dout_v * keep - delta);
  return {p * keep, dlogit * slope, dlogit};
}

// Adds dlogits to the gradient of the bias (S2), summed over the dims the bias is broadcast over.
// Without broadcasting every place is added to once; where all queries share a place, a lane first
// sums over the queries it holds and a quad over its lanes.
struct BiasSums {
  float* plane;  // of one head, strides as the bias; nullptr = not wanted
  int64_t row_stride, column_stride;
  float of_keys[2][2];  // [i][half] of the fragments, used when row_stride is 0

  __device__ __forceinline__ void add(int query, int key, int i, int half, float dlogit) {
    if (row_stride == 0) {
      of_keys[i][half] += dlogit;
    } else if (dlogit != 0.0f) {
      ptx::reduce_add(plane + query * row_stride + key * column_stride, dlogit);
    }
  }

  // After the last add() of a step. first_key: of the warp.
  __device__ __forceinline__ void finish(int first_key, int lane_idx) {
    if (row_stride != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = of_keys[i][half];
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, 2);
        const int key = first_key + 16 * i + 8 * half + lane_idx / 4;
        if (lane_idx % 4 == 0 && sum != 0.0f) ptx::reduce_add(plane + key * column_stride, sum);
        of_keys[i][half] = 0.0f;
      }
    }
  }
};

__device__ __forceinline__ BiasSums make_bias_sums(const AttentionParams& params,
                                                   const BackwardWorkspace& workspace,
                                                   const device::SequenceTile& place, int head) {
  if (workspace.dbias == nullptr) return {};
  const int64_t offset =
      device::batch_offset(params.bias, params, place.batch) + head * params.bias.head_stride;
  return {workspace.dbias + offset, params.bias.row_stride, params.bias.column_stride, {}};
}

// compute_gradient() with soft cap, bias, masks and dropout.
template <class Config>
__device__ __forceinline__ void compute_gradient_general(
    const AttentionParams& params, const device::Visibility& see,
    const device::DropoutStream& dropout, const FragmentOrigin& origin, bool is_partial,
    const float* lse_log2, const float* delta, const LseRows& lse_rows, int lane_idx,
    BiasSums bias_sums, ScoreFragments<Config>& scores, ScoreFragments<Config>& dscores) {
  uint32_t kept[Config::kChunkQ / 4];
  if (dropout.threshold > 0) {
    device::draw_kept<Config::kChunkQ / 8>(dropout, origin.query, origin.key, lane_idx, kept);
  }
#pragma unroll
  for (int j = 0; j < Config::kChunkQ / 8; ++j) {
    const float2 row_lse_log2 = of_queries(lse_log2, j, lane_idx);
    const int first_query = query_of(origin, j, lane_idx, 0);
    const RowLse row_lse[2] = {lse_rows.at(first_query, row_lse_log2.x),
                               lse_rows.at(first_query + 1, row_lse_log2.y)};
    const float2 row_delta = of_queries(delta, j, lane_idx);
#pragma unroll
    for (int i = 0; i < Config::kTilesM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float keep = 1.0f;
        if (dropout.threshold > 0) {
          const int bit = 8 * (2 * i + e / 2) + lane_idx / 4;
          keep = (kept[2 * j + e % 2] >> bit & 1) != 0 ? dropout.scale : 0.0f;
        }
        const int query = query_of(origin, j, lane_idx, e), key = key_of(origin, i, lane_idx, e);
        const PairGradient pair =
            pair_gradient(params, see, is_partial, query, key, keep, row_lse[e % 2],
                          e % 2 == 0 ? row_delta.x : row_delta.y, scores.values[i][j][e],
                          dscores.values[i][j][e]);
        scores.values[i][j][e] = pair.score;
        dscores.values[i][j][e] = pair.dscore;
        if (bias_sums.plane != nullptr) bias_sums.add(query, key, i, e / 2, pair.dlogit);
      }
    }
  }
  if (bias_sums.plane != nullptr) bias_sums.finish(origin.key, lane_idx);
}

}  // namespace jaxflash::fa2_sm80
