// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): dK, dV and sums of dQ of plain calls.
//
// The work of a CTA of backward_kv.cuh, with fewer reads of shared memory: a warp of role 0 forms S
// and keeps P and dV, its partner of role 1 forms dP and keeps dS and dK. For the same registers
// the tiles of S are twice as large, and P and dS are left operands without leaving the registers.
// P alone is handed over, rounded as dV sees it. dQ follows one step later: role 1 starts a step
// with it, role 0 ends one with it, so that one role multiplies while the other takes exponentials.
// Needs what the prepare kernel left in the workspace. 16-bit elements; any T, S; H, Hv multiples
// of 8, at most 256.
//
//   copy q, dout (step i + 1)  ============================  cp.async, other stage
//   role 0   S^T, P            =========
//            dV += P^T dout            |=========
//            dQ of step i - 1          |         =====
//   role 1   dQ of step i - 1  =====   |
//            dP^T, dS               ===|====
//            dK += dS^T Q              |    =========
//   dV, dK from others' P, dS          |               B====
//                              A       P                    A of step i + 1
//
// barrier   protects
// A         tile i and dS of step i - 1 have arrived for everybody; of step i - 1 the stage's tiles
//           and P are read, and dS of step i - 2
// P         P of the partner, which does not wait, is written
// B         P and dS of everybody are written; only where warps exchange them
#pragma once

#include "kernels/fa2_sm80/backward_kv.cuh"
#include "ptx/named_barrier.cuh"

namespace jaxflash::fa2_sm80 {

// P is handed over, and is the operand of dV, as 2^kScale P: in float16 the probabilities of long
// rows would otherwise lose bits. Powers of two are exact.
template <class Element>
constexpr int kProbabilityScale = std::is_same_v<Element, __half> ? 15 : 0;

struct RolePlace {
  int lane_idx;
  int role;    // 0: S, P, dV; 1: dP, dS, dK
  int pair;    // the same for both partners
  int kv_row;  // of the tile: the pair's 32 keys
  int part;    // which chunk of the queries it forms and which columns of the head dim it sums
  int dq_row, dq_column;
};

template <class Config>
__device__ __forceinline__ RolePlace locate_role(int thread_idx) {
  const int warp_idx = __shfl_sync(0xFFFFFFFF, thread_idx / 32, 0);
  RolePlace warp;
  warp.lane_idx = thread_idx % 32;
  warp.role = warp_idx / Config::kRoleWarps;
  warp.pair = warp_idx % Config::kRoleWarps;
  warp.kv_row = warp.pair % Config::kWarpsKV * Config::kWarpRowsKV;
  warp.part = warp.pair / Config::kWarpsKV;
  warp.dq_row = warp_idx % Config::kWarpsQ * 32;
  warp.dq_column = warp_idx / Config::kWarpsQ * Config::kWarpColumnsDQ;
  return warp;
}

// Whether no query of a warp's chunk sees any of its keys.
template <class Config>
__device__ __forceinline__ bool is_outside_window(const device::Window& see,
                                                  const FragmentOrigin& origin) {
  return origin.key > origin.query + Config::kChunkQ - 1 + see.window_high ||
         origin.key + Config::kWarpRowsKV - 1 < origin.query + see.window_low ||
         origin.key >= see.kv_len || origin.query >= see.query_len;
}

// q.k -> 2^kProbabilityScale P. lse_log2 begins at the fragments' first query.
template <class Config, class Element>
__device__ __forceinline__ void compute_probabilities(float softmax_scale_log2,
                                                      const float* lse_log2, int lane_idx,
                                                      ScoreFragments<Config>& scores) {
#pragma unroll
  for (int j = 0; j < Config::kChunkQ / 8; ++j) {
    const float2 row_lse = of_queries(lse_log2, j, lane_idx);
    const float shift[2] = {kProbabilityScale<Element> - row_lse.x,
                            kProbabilityScale<Element> - row_lse.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores.values[i][j][e] =
            ptx::exp2_approx(fmaf(scores.values[i][j][e], softmax_scale_log2, shift[e % 2]));
      }
    }
  }
}

// dout.v -> dS, with the partner's P of keys row.. and queries column...
template <class Config, class Element>
__device__ __forceinline__ void compute_dscores(const typename Config::ScoreTile& probabilities,
                                                int row, int column, const float* delta,
                                                int lane_idx, ScoreFragments<Config>& dscores) {
  constexpr float kFactor = 1.0f / (1 << kProbabilityScale<Element>);
#pragma unroll
  for (int k = 0; k < Config::kChunkQ / 16; ++k) {
    float shift[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 row_delta = of_queries(delta, 2 * k + n, lane_idx);
      shift[n][0] = -kFactor * row_delta.x;
      shift[n][1] = -kFactor * row_delta.y;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma::Fragment<Element> a;  // of as_a()
      probabilities.load_a(row + 16 * i, column + 16 * k, lane_idx, a);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 p = ptx::unpack<Element>(a[m]);
        float* pair = dscores.values[i][2 * k + m / 2] + 2 * (m % 2);
        pair[0] = p.x * fmaf(kFactor, pair[0], shift[m / 2][0]);
        pair[1] = p.y * fmaf(kFactor, pair[1], shift[m / 2][1]);
      }
    }
  }
}

// Adds this warp's dQ = dS K of a step (line 15), whose dS is written by everybody.
template <class Config, class Element>
__device__ __forceinline__ void add_query_gradient(const typename Config::SharedStorage& shared,
                                                   const RolePlace& warp, int buffer, float* sums) {
  constexpr int kPartColumns = 32;  // more at a time would want more registers
#pragma unroll
  for (int column = 0; column < Config::kWarpColumnsDQ; column += kPartColumns) {
    mma::Accumulator<2, kPartColumns / 8> dq;
    compute_dq<Config, Element>(shared.dscores[buffer], shared.k, warp.dq_row,
                                warp.dq_column + column, warp.lane_idx, dq);
    float* place = sums +
                   dq_offset<Config::kHeadDim>(warp.dq_row / 16, (warp.dq_column + column) / 8) +
                   dq_lane_offset(warp.lane_idx, 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kPartColumns / 8; ++j) {
        add_dq(place + dq_offset<Config::kHeadDim>(i, j), dq.values[i][j]);
      }
    }
  }
}

template <class Config, class Element>
__device__ __forceinline__ void backward_roles_tile(const BackwardParams& params,
                                                    const SequenceInputs& inputs,
                                                    const BackwardWorkspace& workspace,
                                                    const device::SequenceTile& place, int kv_head,
                                                    typename Config::SharedStorage& shared) {
  const AttentionParams& attention = params.attention;
  RolePlace warp = locate_role<Config>(threadIdx.x);
  QueryStream<Config, false> stream(attention, place, kv_head);
  const int slot = first_slot(inputs, place);
  const auto index_of = [&](int head, int tile) {
    return workspace.index_of(attention, place.batch, head, slot + tile);
  };
  const auto load = [&](int stage) {  // line 8
    load_query_step<Config, false>(params, workspace, stream, index_of(stream.head, stream.tile), 0,
                                   shared.q[stage], shared.dout[stage], shared.statistics[stage]);
  };
  KvGradient<Config> gradient;  // dV or dK
  gradient.clear();
  bool has_tile = stream.advance(warp.lane_idx);
  if (has_tile) {
    load_keys<false, Config::kThreads>(attention, place, kv_head, place.row_begin, shared.k,
                                       shared.v);  // line 6
    load(0);
  }
  const auto& owned = warp.role == 0 ? shared.k : shared.v;
  int stage = 0, buffer = 0;
  float* previous = nullptr;  // the sums of the step before, where dQ is missing
  while (has_tile) {
    warp.lane_idx = ptx::opaque(warp.lane_idx);  // as in backward_kv.cuh
    const int lane_idx = warp.lane_idx, tile = stream.tile;
    const bool is_partial = stream.is_partial;
    float* sums = workspace.dq;
    if (sums != nullptr) {
      sums += index_of(stream.head, tile) * (Config::kBlockQ * Config::kHeadDim);
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // A
    has_tile = stream.advance(lane_idx);
    if (has_tile) load(stage ^ 1);
    if (warp.role == 1 && previous != nullptr) {
      add_query_gradient<Config, Element>(shared, warp, buffer ^ 1, previous);
    }
    const int column = warp.part * Config::kChunkQ;
    const int first_column = warp.part * Config::kWarpColumns;
    const auto& scored = warp.role == 0 ? shared.q[stage] : shared.dout[stage];
    const auto& summed = warp.role == 0 ? shared.dout[stage] : shared.q[stage];
    auto& exchanged = warp.role == 0 ? shared.probabilities : shared.dscores[buffer];
    const FragmentOrigin origin = {place.row_begin + warp.kv_row, tile * Config::kBlockQ + column};
    ScoreFragments<Config> scores;
    if (is_partial && is_outside_window<Config>(stream.see, origin)) {
      scores.clear();
      store_scores<Config, Element>(scores, warp.kv_row, column, lane_idx, exchanged);
    } else {
      compute_scores<Config, Element>(owned, scored, warp.kv_row, column, lane_idx, scores);
      const RowStatistics& statistics = shared.statistics[stage];
      if (warp.role == 0) {
        if (is_partial) hide_outside_window<Config>(stream.see, origin, lane_idx, scores);
        compute_probabilities<Config, Element>(attention.softmax_scale * device::kLog2E,
                                               statistics.lse_log2 + column, lane_idx, scores);
      } else {
        ptx::named_barrier_sync(1 + warp.pair, 64);  // P
        compute_dscores<Config, Element>(shared.probabilities, warp.kv_row, column,
                                         statistics.delta + column, lane_idx, scores);
      }
      store_scores<Config, Element>(scores, warp.kv_row, column, lane_idx, exchanged);
      if (warp.role == 0) ptx::named_barrier_arrive(1 + warp.pair, 64);  // P
      accumulate_kv<Config, Element>(scores, summed, column, first_column, lane_idx, gradient);
    }
    if (warp.role == 0 && previous != nullptr) {
      add_query_gradient<Config, Element>(shared, warp, buffer ^ 1, previous);
    }
    previous = sums;
    if constexpr (Config::kExchanges) {
      __syncthreads();  // B
#pragma unroll
      for (int other = 1; other < Config::kWarpsD; ++other) {
        const int chunk = (warp.part + other) % Config::kWarpsD * Config::kChunkQ;
        accumulate_kv<Config, Element>(exchanged, summed, warp.kv_row, chunk, first_column,
                                       lane_idx, gradient);
      }
    }
    buffer ^= 1;
    stage ^= 1;
  }
  if (previous != nullptr) {
    __syncthreads();  // dS of the last step is written by everybody
    add_query_gradient<Config, Element>(shared, warp, buffer ^ 1, previous);
  }
  // Line 19. The sums of rows of padding are zeros, as their gradients should be.
  const int64_t features = warp.role == 0 ? attention.Hv : attention.H;
  void* destination = warp.role == 0 ? params.dv : params.dk;
  const float factor =
      warp.role == 0 ? 1.0f / (1 << kProbabilityScale<Element>) : attention.softmax_scale;
  const int64_t row =
      (place.batch * attention.S + place.kv_begin + place.row_begin) * attention.K + kv_head;
  store_fragments<Element>(gradient, factor, warp.kv_row, warp.part * Config::kWarpColumns,
                           place.kv_rows - place.row_begin, attention.K * features,
                           static_cast<int>(features), warp.lane_idx,
                           static_cast<Element*>(destination) + row * features);
}

template <class Config, class Element>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    backward_roles_kernel(const __grid_constant__ BackwardParams params,
                          const __grid_constant__ SequenceInputs inputs,
                          const __grid_constant__ BackwardWorkspace workspace,
                          const __grid_constant__ KvGrid grid) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  const KvTilePlace owned = locate_kv_tile<Config>(params.attention, inputs, grid);
  if (!owned.has_rows) return;
  backward_roles_tile<Config, Element>(params, inputs, workspace, owned.sequence, owned.kv_head,
                                       shared);
}

}  // namespace jaxflash::fa2_sm80
