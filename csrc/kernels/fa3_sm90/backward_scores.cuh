// What happens to S^T and dP^T in registers: P = exp(S - lse), dS = P * (dP - delta), rounding.
#pragma once

#include "device/soft_cap.cuh"
#include "device/visibility.cuh"
#include "kernels/fa3_sm90/backward_products.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

namespace jaxflash::fa3_sm90 {

// scores: S - lse / softmax_scale -> P.
template <class Config>
__device__ __forceinline__ void exponentiate(float scale_log2, ScoreFragment<Config>& scores) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    scores[i] = ptx::exp2_approx(scores[i] * scale_log2);
  }
}

// Which queries the window lets see a lane's keys, first_key and first_key + 8, counted from its
// first query.
struct QueriesOfKeys {
  unsigned begin[2], count[2];

  __device__ __forceinline__ QueriesOfKeys(const device::Window& see, int first_key,
                                           int first_query) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + 8 * r;
      const int first = max(key - see.window_high, 0);
      const int end = key < see.kv_len ? min(key - see.window_low + 1, see.query_len) : 0;
      begin[r] = first - first_query;
      count[r] = max(end - first, 0);
    }
  }

  __device__ __forceinline__ bool contain(unsigned query, int r) const {
    return query - begin[r] < count[r];
  }
};

// Zeroes the elements of pairs outside the window, whatever was there.
template <class Config>
__device__ __forceinline__ void hide(const QueriesOfKeys& queries,
                                     ScoreFragment<Config>& fragment) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    if (!queries.contain(i / 4 * 8 + i % 2, i / 2 % 2)) fragment[i] = 0.0f;
  }
}

// Bit i % 32 of word i / 32: whether element i of a lane's fragment is a visible pair.
template <class Config>
using VisibleBits = uint32_t[Config::kBlockQ / 64];

template <class Config>
__device__ __forceinline__ void find_visible(const QueriesOfKeys& queries,
                                             VisibleBits<Config>& visible) {
#pragma unroll
  for (int word = 0; word < Config::kBlockQ / 64; ++word) {
    visible[word] = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (queries.contain(64 * word + i / 4 * 8 + i % 2, i / 2 % 2)) visible[word] |= 1u << i;
    }
  }
}

// Clears the bits of pairs that are hidden: bit r of hidden_keys(query) stands for the first or the
// second key. Asks only about queries below query_len.
template <class Config, class HiddenKeys>
__device__ __forceinline__ void clear_bits(int first_query, int query_len,
                                           const HiddenKeys& hidden_keys,
                                           VisibleBits<Config>& visible) {
#pragma unroll
  for (int word = 0; word < Config::kBlockQ / 64; ++word) {
#pragma unroll 4
    for (int j = 0; j < 8; ++j) {
      uint32_t hidden = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int query = min(first_query + 64 * word + 8 * j + e, query_len - 1);
        const uint32_t bits = hidden_keys(query);
        hidden |= ((bits & 1) | (bits & 2) << 1) << e;
      }
      visible[word] &= ~(hidden << 4 * j);
    }
  }
}

// Clears the bits of pairs that segment ids or block mask hide. What lies beyond the lengths is
// neither read nor visible.
template <class Config>
__device__ __forceinline__ void clear_masked(const device::Visibility& see, int first_key,
                                             int first_query, VisibleBits<Config>& visible) {
  const int keys[2] = {min(first_key, see.kv_len - 1), min(first_key + 8, see.kv_len - 1)};
  if (see.query_ids != nullptr) {
    const int32_t ids[2] = {see.kv_ids[keys[0]], see.kv_ids[keys[1]]};
    clear_bits<Config>(
        first_query, see.query_len,
        [&](int query) {
          const int32_t id = see.query_ids[query];
          return (id < 0 || id != ids[0] ? 1u : 0u) | (id < 0 || id != ids[1] ? 2u : 0u);
        },
        visible);
  }
  if (see.block_mask.data != nullptr) {
    const auto* blocks = static_cast<const uint8_t*>(see.block_mask.data);
    const uint8_t* columns[2] = {
        blocks + keys[0] / see.mask_block_kv * see.block_mask.column_stride,
        blocks + keys[1] / see.mask_block_kv * see.block_mask.column_stride};
    clear_bits<Config>(
        first_query, see.query_len,
        [&](int query) {
          const int64_t row = query / see.mask_block_q * see.block_mask.row_stride;
          return (columns[0][row] == 0 ? 1u : 0u) | (columns[1][row] == 0 ? 2u : 0u);
        },
        visible);
  }
}

// Zeroes the elements of hidden pairs, whatever was there.
template <class Config>
__device__ __forceinline__ void keep_visible(const VisibleBits<Config>& visible,
                                             ScoreFragment<Config>& fragment) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    if ((visible[i / 32] >> i % 32 & 1) == 0) fragment[i] = 0.0f;
  }
}

// gradient: dP - delta -> dS.
template <class Config>
__device__ __forceinline__ void multiply(const ScoreFragment<Config>& probabilities,
                                         ScoreFragment<Config>& gradient) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) gradient[i] *= probabilities[i];
}

// What comes between S and P: nothing, or a soft cap as device::SoftCap takes it.
enum class Cap { kNone, kSmall, kLarge };

// P of a pair from S and float32 statistics, and the slope of the soft cap there. Without one
// S * softmax_scale - lse is formed with one rounding, so that rows of large logits stay right.
struct CappedProbability {
  float p, slope;
};
template <Cap kCap>
__device__ __forceinline__ CappedProbability capped_probability(float softmax_scale,
                                                                const device::SoftCap& soft_cap,
                                                                const RowStatistics& row,
                                                                float score) {
  float exponent, slope = 1.0f;
  if constexpr (kCap == Cap::kNone) {
    exponent = fmaf(score, softmax_scale, -row.lse);
  } else {
    const device::SoftCapped capped = soft_cap.of<kCap == Cap::kLarge>(score);
    exponent = capped.logit - row.lse;
    slope = capped.slope;
  }
  return {ptx::exp2_approx((exponent - row.lse_low) * device::kLog2E), slope};
}

// scores: S -> P; gradient: dP -> dS, with the soft cap's slope. rows: from the lane's first query
// on.
template <class Config, Cap kCap>
__device__ __forceinline__ void form_extreme(float softmax_scale, const device::SoftCap& soft_cap,
                                             const RowStatistics* rows,
                                             ScoreFragment<Config>& scores,
                                             ScoreFragment<Config>& gradient) {
#pragma unroll
  for (int i = 0; i < Config::kBlockQ / 2; ++i) {
    const RowStatistics row = rows[i / 4 * 8 + i % 2];
    const CappedProbability pair =
        capped_probability<kCap>(softmax_scale, soft_cap, row, scores[i]);
    scores[i] = pair.p;
    gradient[i] = pair.p * pair.slope * (gradient[i] - row.delta);
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
template <class Tile>
__device__ __forceinline__ uint32_t dscores_address(const Tile& dscores, int c, int warp_idx,
                                                    int lane_idx) {
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
