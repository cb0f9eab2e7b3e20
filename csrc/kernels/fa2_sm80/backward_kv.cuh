// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2): dK, dV and the sums of dQ.
//
// One CTA owns a tile of K and V of one KV head (line 6) and meets, in a fixed order, every query
// tile of every query head of the group (line 7): dK and dV are sums over the group that one CTA
// forms alone, so they are bitwise repeatable. dQ is added to the workspace with atomics.
// Needs what the prepare kernel left there. Any T, S, H, Hv <= 256; sm_80 and newer.
//
//   copy q, dout (step i + 1)      ==================================== cp.async, other stage
//   S^T = K Q^T, dP^T = V dout^T   ========
//   P, dS                                  ====  -> shared memory
//   dV, dK from own P, dS                      =====
//   dQ (atomics)                                    |===      ===
//   dV, dK from other warps' P, dS                  |   ======   ======
//                                                   B                  A of step i + 1
//
// barrier   protects
// A         tile i has arrived for everybody; of step i - 1, the stage's tiles, P and dS are read
// B         dS^T (and P^T where warps exchange it) is written by everybody
#pragma once

#include <type_traits>
#include <variant>

#include "device/block_word.cuh"
#include "kernels/fa2_sm80/backward_load.cuh"
#include "kernels/fa2_sm80/backward_scores.cuh"
#include "kernels/fa2_sm80/backward_workspace.cuh"

namespace jaxflash::fa2_sm80 {

struct WarpPlace {
  int lane_idx;
  int kv_row;     // of the tile: first of this warp's keys
  int kv_column;  // first of its columns of dK and dV
  int dq_row, dq_column;
  int warp_d;
};

template <class Config>
__device__ __forceinline__ WarpPlace locate_warp(int thread_idx) {
  const int warp_idx = __shfl_sync(0xFFFFFFFF, thread_idx / 32, 0);
  WarpPlace warp;
  warp.lane_idx = thread_idx % 32;
  warp.warp_d = warp_idx / Config::kWarpsKV;
  warp.kv_row = warp_idx % Config::kWarpsKV * Config::kWarpRowsKV;
  warp.kv_column = warp.warp_d * Config::kWarpColumns;
  warp.dq_row = warp_idx % Config::kWarpsQ * 32;
  warp.dq_column = warp_idx / Config::kWarpsQ * Config::kWarpColumnsDQ;
  return warp;
}

// Order of the CTAs. A head is one KV head of one batch entry; `heads_together` of them form a
// block, in which the first tiles of all heads come first: for causal calls the longest.
struct KvGrid {
  int tiles;  // of a head
  int heads_together;
};

// What a CTA owns.
struct KvTilePlace {
  device::SequenceTile sequence;
  int kv_head;
  bool has_rows;
};

template <class Config>
__device__ __forceinline__ KvTilePlace locate_kv_tile(const AttentionParams& params,
                                                      const SequenceInputs& inputs,
                                                      const KvGrid& grid) {
  const int K = static_cast<int>(params.K), num_heads = static_cast<int>(params.B) * K;
  const int block_ctas = grid.tiles * grid.heads_together;
  const int first_head = blockIdx.x / block_ctas * grid.heads_together;
  const int heads = min(grid.heads_together, num_heads - first_head);  // of this block
  const int place = blockIdx.x % block_ctas, head = first_head + place % heads;
  KvTilePlace owned;
  owned.kv_head = head % K;
  owned.sequence =
      device::locate_tile<false, Config::kBlockKV>(params, inputs, head / K, place / heads);
  owned.has_rows =
      owned.sequence.row_begin >= 0 && owned.sequence.row_begin < owned.sequence.kv_rows;
  return owned;
}

// The (head, query tile) pairs that an owned tile of keys meets, heads outside.
template <class Config, bool kIsGeneral>
struct QueryStream {
  using See = std::conditional_t<kIsGeneral, device::Visibility, device::Window>;

  const AttentionParams& params;
  const device::SequenceTile& place;
  See see;
  int head, end_head, tile, first_tile, end_tile;
  bool is_partial;  // whether masks must be consulted in the current tile
  std::conditional_t<kIsGeneral, device::BlockWord, std::monostate> block_word;

  __device__ __forceinline__ QueryStream(const AttentionParams& params,
                                         const device::SequenceTile& place, int kv_head)
      : params(params), place(place) {
    const int group_size = static_cast<int>(params.group_size);
    head = kv_head * group_size;
    end_head = head + group_size;
    if constexpr (kIsGeneral) {
      see = device::make_visibility(params, place, head);
    } else {
      see = device::make_window(params, place);
    }
    int begin, end;
    device::query_range(see, place.row_begin, place.row_begin + Config::kBlockKV, &begin, &end);
    first_tile = begin / Config::kBlockQ;
    end_tile = begin < end ? (end - 1) / Config::kBlockQ + 1 : first_tile;
    tile = first_tile - 1;
  }

  // Moves to the next pair that is not hidden; false at the end. All lanes call it together.
  __device__ __forceinline__ bool advance(int lane_idx) {
    const auto box_of = [&](int tile) -> device::Box {
      const int row = tile * Config::kBlockQ, key = place.row_begin;
      return {row, row + Config::kBlockQ, key, key + Config::kBlockKV};
    };
    ++tile;
    for (;;) {
      if (tile >= end_tile) {
        tile = first_tile;
        if (++head >= end_head || first_tile >= end_tile) return false;
        if constexpr (kIsGeneral) {
          device::select_head(params, place.batch, head, &see);
          block_word.forget();
        }
      }
      if constexpr (kIsGeneral) {
        device::Tile kind;
        tile = device::first_visible(see, box_of, tile, end_tile, lane_idx, &block_word, &kind);
        if (tile >= end_tile) continue;
        is_partial = kind == device::Tile::kPartial;
      } else {
        is_partial = !device::is_inside_window<true>(see, box_of(tile));
      }
      return true;
    }
  }
};

// The share of dV or dK that comes from the chunks of the other warps with this warp's keys.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_others(const typename Config::ScoreTile& left,
                                                  const typename Config::QTile& right,
                                                  const WarpPlace& warp,
                                                  KvGradient<Config>& gradient) {
#pragma unroll 1
  for (int other = 1; other < Config::kWarpsD; ++other) {
    const int chunk_row = (warp.warp_d + other) % Config::kWarpsD * Config::kChunkQ;
    accumulate_kv<Config, Element>(left, right, warp.kv_row, chunk_row, warp.kv_column,
                                   warp.lane_idx, gradient);
  }
}

// Adds a part of this warp's dQ = dS K to the workspace (line 15).
template <class Config, class Element>
__device__ __forceinline__ void add_query_gradient(const typename Config::SharedStorage& shared,
                                                   const WarpPlace& warp, int part, float* sums) {
  const int column = warp.dq_column + part * Config::kPartColumnsDQ;
  QueryGradient<Config> dq;
  compute_dq<Config, Element>(shared.dscores, shared.k, warp.dq_row, column, warp.lane_idx, dq);
  float* place = sums + dq_offset<Config::kHeadDim>(warp.dq_row / 16, column / 8) +
                 dq_lane_offset(warp.lane_idx, 0);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < Config::kPartColumnsDQ / 8; ++j) {
      add_dq(place + dq_offset<Config::kHeadDim>(i, j), dq.values[i][j]);
    }
  }
}

// Starts copying what a step reads of the stream's pair: q, dout and the statistics of the slot
// `index`, of which the tile's begin at row_in_slot.
template <class Config, bool kIsGeneral>
__device__ __forceinline__ void load_query_step(
    const BackwardParams& params, const BackwardWorkspace& workspace,
    const QueryStream<Config, kIsGeneral>& stream, int64_t index, int row_in_slot,
    typename Config::QTile& q, typename Config::QTile& dout, RowStatistics& shared_statistics) {
  const RowStatistics* statistics = workspace.statistics + index;
  load_queries<kIsGeneral, Config::kThreads>(params, stream.see, stream.place,
                                             statistics->lse_log2 + row_in_slot, stream.head,
                                             stream.tile * Config::kBlockQ, q, dout);
  constexpr int kCopies = sizeof(RowStatistics) / 16;
  if (threadIdx.x < kCopies) {
    ptx::cp_async_16(ptx::shared_address(&shared_statistics) + 16 * threadIdx.x,
                     reinterpret_cast<const float4*>(statistics) + threadIdx.x, true);
  }
  ptx::cp_async_commit();
}

template <class Config, class Element, bool kIsGeneral>
__device__ __forceinline__ void backward_kv_tile(const BackwardParams& params,
                                                 const SequenceInputs& inputs,
                                                 const BackwardWorkspace& workspace,
                                                 const device::SequenceTile& place, int kv_head,
                                                 typename Config::SharedStorage& shared) {
  const AttentionParams& attention = params.attention;
  WarpPlace warp = locate_warp<Config>(threadIdx.x);
  QueryStream<Config, kIsGeneral> stream(attention, place, kv_head);
  const int slot = first_slot(inputs, place);
  const auto index_of = [&](int head, int tile) {
    return workspace.index_of(attention, place.batch, head, slot + tile / Config::kStepsPerSlot);
  };
  const auto row_in_slot = [](int tile) { return tile % Config::kStepsPerSlot * Config::kBlockQ; };
  const auto load = [&](int stage) {  // line 8
    load_query_step<Config, kIsGeneral>(
        params, workspace, stream, index_of(stream.head, stream.tile), row_in_slot(stream.tile),
        shared.q[stage], shared.dout[stage], shared.statistics[stage]);
  };
  KvGradient<Config> dk, dv;
  dk.clear();
  dv.clear();
  bool has_tile = stream.advance(warp.lane_idx);
  if (has_tile) {
    load_keys<kIsGeneral, Config::kThreads>(attention, place, kv_head, place.row_begin, shared.k,
                                            shared.v);  // line 6
    load(0);
  }
  const bool adds_dq = workspace.dq != nullptr;
  int stage = 0;
  while (has_tile) {
    // Opaque, so that the many addresses inside shared memory are formed where they are used and
    // not once, before the loop, at the price of spills.
    warp.lane_idx = ptx::opaque(warp.lane_idx);
    const int lane_idx = warp.lane_idx, head = stream.head, tile = stream.tile;
    const bool is_partial = stream.is_partial;
    ptx::cp_async_wait<0>();
    __syncthreads();  // A
    if constexpr (Config::kStages == 2) {
      has_tile = stream.advance(lane_idx);
      if (has_tile) load(stage ^ 1);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < Config::kNumChunks; ++chunk) {
      const int column = (Config::kExchanges ? warp.warp_d : chunk) * Config::kChunkQ;
      const FragmentOrigin origin = {place.row_begin + warp.kv_row,
                                     tile * Config::kBlockQ + column};
      const RowStatistics& statistics = shared.statistics[stage];
      const int statistics_row = row_in_slot(tile) + column;
      ScoreFragments<Config> p, ds;
      compute_scores<Config, Element>(shared.k, shared.q[stage], warp.kv_row, column, lane_idx, p);
      compute_scores<Config, Element>(shared.v, shared.dout[stage], warp.kv_row, column, lane_idx,
                                      ds);
      // float32 has no registers for both forms.
      constexpr bool kHasPlainForm = !kIsGeneral || sizeof(typename Config::Stored) == 2;
      if (kIsGeneral && (!kHasPlainForm || is_partial || has_adjusted_pairs(attention))) {
        if constexpr (kIsGeneral) {
          device::Visibility see = stream.see;
          if (head != stream.head) device::select_head(attention, place.batch, head, &see);
          compute_gradient_general<Config>(
              attention, see, device::make_dropout(attention, place, head), origin, is_partial,
              statistics.lse_log2 + statistics_row, statistics.delta + statistics_row,
              make_lse_rows(params, place, head), lane_idx,
              make_bias_sums(attention, workspace, place, head), p, ds);
        }
      } else {
        if (!kIsGeneral && is_partial) {
          hide_outside_window<Config>(stream.see, origin, lane_idx, p);
        }
        compute_gradient<Config>(attention.softmax_scale * device::kLog2E,
                                 statistics.lse_log2 + statistics_row,
                                 statistics.delta + statistics_row, lane_idx, p, ds);
      }
      store_scores<Config, Element>(ds, warp.kv_row, column, lane_idx, shared.dscores);
      if constexpr (Config::kExchanges) {
        store_scores<Config, Element>(p, warp.kv_row, column, lane_idx, shared.probabilities);
      }
      accumulate_kv<Config, Element>(p, shared.dout[stage], column, warp.kv_column, lane_idx, dv);
      accumulate_kv<Config, Element>(ds, shared.q[stage], column, warp.kv_column, lane_idx, dk);
    }
    __syncthreads();  // B
    float* sums = workspace.dq + index_of(head, tile) * (kBackwardBlockQ * Config::kHeadDim) +
                  dq_offset<Config::kHeadDim>(row_in_slot(tile) / 16, 0);
    if (adds_dq) add_query_gradient<Config, Element>(shared, warp, 0, sums);
    if constexpr (Config::kExchanges) {
      accumulate_others<Config, Element>(shared.probabilities, shared.dout[stage], warp, dv);
    }
    if constexpr (Config::kPartsDQ == 2) {
      if (adds_dq) add_query_gradient<Config, Element>(shared, warp, 1, sums);
    }
    if constexpr (Config::kExchanges) {
      accumulate_others<Config, Element>(shared.dscores, shared.q[stage], warp, dk);
    }
    if constexpr (Config::kStages == 2) {
      stage ^= 1;
    } else {
      has_tile = stream.advance(lane_idx);
      __syncthreads();  // the only stage is read
      if (has_tile) load(0);
    }
  }
  const int num_rows = place.kv_rows - place.row_begin;
  const int64_t row =
      (place.batch * attention.S + place.kv_begin + place.row_begin) * attention.K + kv_head;
  // Line 19. The sums of rows of padding are zeros, as their gradients should be.
  store_fragments<Element>(dk, attention.softmax_scale, warp.kv_row, warp.kv_column, num_rows,
                           attention.K * attention.H, static_cast<int>(attention.H), warp.lane_idx,
                           static_cast<Element*>(params.dk) + row * attention.H);
  store_fragments<Element>(dv, 1.0f, warp.kv_row, warp.kv_column, num_rows,
                           attention.K * attention.Hv, static_cast<int>(attention.Hv),
                           warp.lane_idx, static_cast<Element*>(params.dv) + row * attention.Hv);
}

template <class Config, class Element, bool kIsGeneral>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    backward_kv_kernel(const __grid_constant__ BackwardParams params,
                       const __grid_constant__ SequenceInputs inputs,
                       const __grid_constant__ BackwardWorkspace workspace,
                       const __grid_constant__ KvGrid grid) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  const KvTilePlace owned = locate_kv_tile<Config>(params.attention, inputs, grid);
  if (!owned.has_rows) return;
  backward_kv_tile<Config, Element, kIsGeneral>(params, inputs, workspace, owned.sequence,
                                                owned.kv_head, shared);
}

}  // namespace jaxflash::fa2_sm80
