// FlashAttention-2 backward (arXiv:2307.08691, Algorithm 2), the roles exchanged: repeatable dQ.
//
// One CTA owns a tile of queries of one head, each warp 16 rows of it, and meets the tiles of keys
// in order; P is computed a second time and dQ is summed in registers, without atomics. Calls that
// ask for deterministic gradients run this beside the key/value kernel, which then adds no dQ.
//
//   copy k, v (step i + 1)          ====================== cp.async, other stage
//   S = Q K^T, dP = dout V^T, dS    ==============
//   dQ += dS K                                    ========
//                                   A                      A of step i + 1
//
// barrier A protects: tile i has arrived for everybody; the other stage is read by everybody
#pragma once

#include <type_traits>
#include <variant>

#include "device/block_word.cuh"
#include "kernels/fa2_sm80/backward_load.cuh"
#include "kernels/fa2_sm80/backward_scores.cuh"
#include "kernels/fa2_sm80/backward_workspace.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
using QueryScores = mma::Accumulator<1, Config::kBlockKV / 8>;  // 16 queries x all keys of a tile

// Statistics of the two rows of a lane: fragment rows lane / 4 and lane / 4 + 8.
struct LaneStatistics {
  float lse_log2[2], delta[2];
  LseRows lse_rows;  // of the head
};

// S = Q K^T or dP = dout V^T: the warp's 16 queries times all keys of a tile.
template <class Config, class Element, class Owned, class Streamed>
__device__ __forceinline__ void compute_query_scores(const Owned& owned, const Streamed& streamed,
                                                     int row, int lane_idx,
                                                     QueryScores<Config>& scores) {
  scores.clear();
#pragma unroll Config::kUnroll
  for (int k = 0; k < Config::kHeadDim; k += 16) {
    mma::Fragment<Element> a;
    owned.load_a(row, k, lane_idx, a);
#pragma unroll
    for (int pair = 0; pair < Config::kBlockKV / 16; ++pair) {
      mma::Fragment<Element> b;
      streamed.load_b(16 * pair, k, lane_idx, b);
      mma::multiply<Element>(scores.values[0][2 * pair], a, b[0], b[1]);
      mma::multiply<Element>(scores.values[0][2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// dscores: dout.v -> dS, where lengths and window alone hide. query and key: first of the
// fragments.
template <class Config>
__device__ __forceinline__ void compute_query_gradient(const AttentionParams& params,
                                                       const device::Window& see, bool is_partial,
                                                       int query, int key,
                                                       const LaneStatistics& rows, int lane_idx,
                                                       const QueryScores<Config>& scores,
                                                       QueryScores<Config>& dscores) {
  const float softmax_scale_log2 = params.softmax_scale * device::kLog2E;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + 8 * half + lane_idx / 4;
#pragma unroll
    for (int j = 0; j < Config::kBlockKV / 8; ++j) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int column = key + 8 * j + lane_idx % 4 * 2 + parity;
        float& dscore = dscores.values[0][j][2 * half + parity];
        float p = ptx::exp2_approx(
            fmaf(scores.values[0][j][2 * half + parity], softmax_scale_log2, -rows.lse_log2[half]));
        if (is_partial && !device::is_in_window(see, row, column)) p = 0.0f;
        dscore = p * (dscore - rows.delta[half]);
      }
    }
  }
}

// The same with soft cap, bias, masks and dropout.
template <class Config>
__device__ __forceinline__ void compute_query_gradient_general(
    const AttentionParams& params, const device::Visibility& see,
    const device::DropoutStream& dropout, bool is_partial, int query, int key,
    const LaneStatistics& rows, int lane_idx, const QueryScores<Config>& scores,
    QueryScores<Config>& dscores) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + 8 * half + lane_idx / 4;
    const RowLse lse = rows.lse_rows.at(row, rows.lse_log2[half]);
    uint32_t words[4];  // of the next four fragments
#pragma unroll
    for (int j = 0; j < Config::kBlockKV / 8; ++j) {
      if (dropout.threshold > 0 && j % 4 == 0) {
        device::draw_words(dropout, row, key + 8 * j, lane_idx, words);
      }
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int column = key + 8 * j + lane_idx % 4 * 2 + parity;
        float& dscore = dscores.values[0][j][2 * half + parity];
        float keep = 1.0f;
        if (dropout.threshold > 0) {
          keep = device::is_kept(dropout, words[j % 4], parity) ? dropout.scale : 0.0f;
        }
        dscore = pair_gradient(params, see, is_partial, row, column, keep, lse, rows.delta[half],
                               scores.values[0][j][2 * half + parity], dscore)
                     .dscore;
      }
    }
  }
}

// dQ += dS K.
template <class Config, class Element>
__device__ __forceinline__ void accumulate_query(const QueryScores<Config>& dscores,
                                                 const typename Config::KvTile& keys, int lane_idx,
                                                 mma::Accumulator<1, Config::kHeadDim / 8>& dq) {
#pragma unroll
  for (int k = 0; k < Config::kBlockKV; k += 16) {
    mma::Fragment<Element> a;
    dscores.template as_a<Element>(0, k / 16, a);
#pragma unroll
    for (int pair = 0; pair < Config::kHeadDim / 16; ++pair) {
      mma::Fragment<Element> b;
      keys.load_b_transposed(k, 16 * pair, lane_idx, b);
      mma::multiply<Element>(dq.values[0][2 * pair], a, b[0], b[1]);
      mma::multiply<Element>(dq.values[0][2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// The tiles of keys that an owned tile of queries meets, in order.
template <class Config, class See>
struct KeyStream {
  static constexpr bool kIsGeneral = std::is_same_v<See, device::Visibility>;

  const See& see;
  int first_row, tile, end_tile;
  bool is_partial;
  std::conditional_t<kIsGeneral, device::BlockWord, std::monostate> block_word;

  __device__ __forceinline__ KeyStream(const See& see, int first_row)
      : see(see), first_row(first_row) {
    int begin, end;
    device::kv_range(see, first_row, first_row + Config::kBlockQ, &begin, &end);
    tile = begin / Config::kBlockKV - 1;
    end_tile = begin < end ? (end - 1) / Config::kBlockKV + 1 : 0;
  }

  // Moves to the next tile that is not hidden; false at the end. All lanes call it together.
  __device__ __forceinline__ bool advance(int lane_idx) {
    const auto box_of = [&](int tile) -> device::Box {
      const int key = tile * Config::kBlockKV;
      return {first_row, first_row + Config::kBlockQ, key, key + Config::kBlockKV};
    };
    ++tile;
    if constexpr (kIsGeneral) {
      device::Tile kind;
      tile = device::first_visible(see, box_of, tile, end_tile, lane_idx, &block_word, &kind);
      is_partial = kind == device::Tile::kPartial;
    } else {
      is_partial = !device::is_inside_window<true>(see, box_of(tile));
    }
    return tile < end_tile;
  }
};

template <class Config, class Element, bool kIsGeneral>
__device__ __forceinline__ void backward_query_tile(const BackwardParams& params,
                                                    const device::SequenceTile& place, int head,
                                                    const RowStatistics& statistics,
                                                    typename Config::SharedStorage& shared) {
  using See = std::conditional_t<kIsGeneral, device::Visibility, device::Window>;
  const AttentionParams& attention = params.attention;
  const int kv_head = head / static_cast<int>(attention.group_size);
  const int warp_row = threadIdx.x / 32 * 16, first_row = place.row_begin;
  int lane_idx = threadIdx.x % 32;
  See see;
  device::DropoutStream dropout = {};
  if constexpr (kIsGeneral) {
    see = device::make_visibility(attention, place, head);
    dropout = device::make_dropout(attention, place, head);
  } else {
    see = device::make_window(attention, place);
  }
  KeyStream<Config, See> stream(see, first_row);
  const auto load = [&](int stage) {
    load_keys<kIsGeneral, Config::kThreads>(attention, place, kv_head,
                                            stream.tile * Config::kBlockKV, shared.k[stage],
                                            shared.v[stage]);
    ptx::cp_async_commit();
  };
  LaneStatistics rows;
  rows.lse_rows = make_lse_rows(params, place, head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + 8 * half + lane_idx / 4;
    rows.lse_log2[half] = statistics.lse_log2[row];
    rows.delta[half] = statistics.delta[row];
  }
  mma::Accumulator<1, Config::kHeadDim / 8> dq;
  dq.clear();
  bool has_tile = stream.advance(lane_idx);
  if (has_tile) {
    load_queries<kIsGeneral, Config::kThreads>(params, see, place, statistics.lse_log2, head,
                                               first_row, shared.q, shared.dout);
    load(0);
  }
  int stage = 0;
  while (has_tile) {
    lane_idx = ptx::opaque(lane_idx);  // as in the key/value kernel
    const int first_key = stream.tile * Config::kBlockKV;
    const bool is_partial = stream.is_partial;
    ptx::cp_async_wait<0>();
    __syncthreads();  // A
    if constexpr (Config::kStages == 2) {
      has_tile = stream.advance(lane_idx);
      if (has_tile) load(stage ^ 1);
    }
    QueryScores<Config> scores, dscores;
    compute_query_scores<Config, Element>(shared.q, shared.k[stage], warp_row, lane_idx, scores);
    compute_query_scores<Config, Element>(shared.dout, shared.v[stage], warp_row, lane_idx,
                                          dscores);
    const int first_query = first_row + warp_row;
    if (kIsGeneral && (is_partial || has_adjusted_pairs(attention))) {
      if constexpr (kIsGeneral) {
        compute_query_gradient_general<Config>(attention, see, dropout, is_partial, first_query,
                                               first_key, rows, lane_idx, scores, dscores);
      }
    } else {
      compute_query_gradient<Config>(attention, see, !kIsGeneral && is_partial, first_query,
                                     first_key, rows, lane_idx, scores, dscores);
    }
    accumulate_query<Config, Element>(dscores, shared.k[stage], lane_idx, dq);
    if constexpr (Config::kStages == 2) {
      stage ^= 1;
    } else {
      has_tile = stream.advance(lane_idx);
      __syncthreads();  // the only stage is read
      if (has_tile) load(0);
    }
  }
  const int64_t row =
      (place.batch * attention.T + place.query_begin + first_row) * attention.N + head;
  store_fragments<Element>(dq, attention.softmax_scale, warp_row, 0, place.query_rows - first_row,
                           attention.N * attention.H, static_cast<int>(attention.H), lane_idx,
                           static_cast<Element*>(params.dq) + row * attention.H);
}

// Grid: as of the prepare kernel.
template <class Config, class Element, bool kIsGeneral>
__global__ void __launch_bounds__(Config::kThreads)
    backward_query_kernel(const __grid_constant__ BackwardParams params,
                          const __grid_constant__ SequenceInputs inputs,
                          const __grid_constant__ BackwardWorkspace workspace) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedStorage*>(shared_memory);
  const QueryTile place = locate_query_tile(params.attention, inputs, workspace.slots);
  if (place.sequence.row_begin >= place.sequence.query_rows) return;
  const RowStatistics& statistics = workspace.statistics[workspace.index_of(
      params.attention, place.sequence.batch, place.head, place.slot)];
  backward_query_tile<Config, Element, kIsGeneral>(params, place.sequence, place.head, statistics,
                                                   shared);
}

}  // namespace jaxflash::fa2_sm80
