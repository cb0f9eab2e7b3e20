// What happens to S^T and dP^T in registers: P = exp(S - lse), dS = P * (dP - delta), rounding.
#pragma once

#include "device/visibility.cuh"
#include "kernels/fa3_sm90/backward_products.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

namespace jaxflash::fa3_sm90 {

// How a step treats its pairs. The first two find -lse and -delta in the accumulators.
enum class StepKind {
  kPlain,    // every pair is visible
  kMasked,   // some are not
  kExtreme,  // the same, and rows may exceed what StatisticColumns can hold: the products start
             // from zero and the statistics come in float32 from the workspace
};

// scores: S - lse / softmax_scale -> P.
template <class Config>
__device__ __forceinline__ void exponentiate(float scale_log2, ScoreFragment<Config>& scores) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    scores[i] = ptx::exp2_approx(scores[i] * scale_log2);
  }
}

// scores: S -> P. S * softmax_scale - lse is formed with one rounding, so that rows of large logits
// stay right. rows: from the lane's first query on.
template <class Config>
__device__ __forceinline__ void exponentiate_extreme(float softmax_scale, const RowStatistics* rows,
                                                     ScoreFragment<Config>& scores) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    const RowStatistics& row = rows[i / 4 * 8 + i % 2];
    const float exponent = fmaf(scores[i], softmax_scale, -row.lse) - row.lse_low;
    scores[i] = ptx::exp2_approx(exponent * device::kLog2E);
  }
}

// P = 0 where a pair is hidden, whatever was there. first_key, first_query: of the lane's elements.
template <class Config>
__device__ __forceinline__ void hide(const device::Window& see, int first_key, int first_query,
                                     ScoreFragment<Config>& probabilities) {
  unsigned begin[2], count[2];  // of the queries that see the key, relative to first_query
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + 8 * r;
    const int first = max(key - see.window_high, 0);
    const int end = key < see.kv_len ? min(key - see.window_low + 1, see.query_len) : 0;
    begin[r] = first - first_query;
    count[r] = max(end - first, 0);
  }
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    const int r = i / 2 % 2;
    const bool is_visible = i / 4 * 8 + i % 2 - begin[r] < count[r];
    if (!is_visible) probabilities[i] = 0.0f;
  }
}

// gradient: dP - delta -> dS.
template <class Config>
__device__ __forceinline__ void multiply(const ScoreFragment<Config>& probabilities,
                                         ScoreFragment<Config>& gradient) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) gradient[i] *= probabilities[i];
}

// gradient: dP -> dS.
template <class Config>
__device__ __forceinline__ void multiply_extreme(const ScoreFragment<Config>& probabilities,
                                                 const RowStatistics* rows,
                                                 ScoreFragment<Config>& gradient) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    gradient[i] = probabilities[i] * (gradient[i] - rows[i / 4 * 8 + i % 2].delta);
  }
}

// An accumulator fragment, rounded, is a left operand without moving anything between lanes.
template <class Config>
__device__ __forceinline__ void round_to_operand(const ScoreFragment<Config>& scores,
                                                 LeftOperand<Config>& operand) {
#pragma unroll
  for (int step = 0; step < Config::kBlockQ / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      operand[step][i] = ptx::pack<typename Config::Element>(scores[8 * step + 2 * i],
                                                             scores[8 * step + 2 * i + 1]);
    }
  }
}

// Shared address at which this lane stores the first 16 queries of dS; see store_dscores.
template <class Config>
__device__ __forceinline__ uint32_t
dscores_address(const mma::WgmmaTile<Config::kBlockQ, Config::kBlockKV>& dscores, int c,
                int warp_idx, int lane_idx) {
  const int query = lane_idx / 16 * 8 + lane_idx % 8;
  return dscores.chunk_address(query, 8 * c + 2 * warp_idx + lane_idx / 8 % 2);
}

// dS^T of this warp's 16 keys into dS [queries, keys].
template <class Config>
__device__ __forceinline__ void store_dscores(const LeftOperand<Config>& operand,
                                              uint32_t address) {
#pragma unroll
  for (int step = 0; step < Config::kBlockQ / 16; ++step) {
    ptx::stmatrix_x4_trans(address + step * (16 * 128), operand[step][0], operand[step][1],
                           operand[step][2], operand[step][3]);
  }
}

// Keeps ptxas from moving the wait for dP above the exponentials: a store that never happens, as P
// is not negative, but needs every P. NaN with its sign bit set is the exception: it would write
// itself into `scratch`, which holds dS of this warpgroup's step that is still to be formed.
template <class Config>
__device__ __forceinline__ void keep_before_wait(const ScoreFragment<Config>& probabilities,
                                                 uint32_t scratch) {
  uint32_t signs = 0;
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) signs |= __float_as_uint(probabilities[i]);
  asm volatile(
      "{\n.reg .pred is_negative;\n"
      "setp.lt.s32 is_negative, %0, 0;\n"
      "@is_negative st.shared.u32 [%1], %0;\n}" ::"r"(signs),
      "r"(scratch)
      : "memory");
}

}  // namespace jaxflash::fa3_sm90
