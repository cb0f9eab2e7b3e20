// FlashAttention-2 forward (arXiv:2307.08691, Algorithm 1) with mma.sync and cp.async.
//
// A CTA owns kBlockQ query rows of one head of one sequence and streams the K/V tiles they see,
// last tile first. Its 4 warps split the query rows, so no reduction ever crosses warps. Per tile:
//
//   S     = Q K^T                        compute_scores
//   S     = masked, capped, biased S     finish_scores    only on tiles that need it
//   m     = running row maximum          update_row_max
//   P     = exp2(S - m); l += sum P      exponentiate     unnormalised
//   O    += P V                          accumulate_output
//
// and once at the end O / l and lse = m + log l (store_output). The copies of tile n + 1 run while
// tile n is computed:
//
//   copy  | K0 V0 | K1 V1        | K2 V2        |
//   math  |       | S0 P0 O += 0 | S1 P1 O += 1 | ...      one barrier per tile
//
// The maximum m is a reference, not exact: it moves only when a logit exceeds it by more than
// kRescaleThreshold, so that P stays below 2^8 and O is rarely rescaled; lse and O stay exact.
//
// Limits: H, Hv <= kHeadDim; T, S < 2^30; see Features for what the plain instance leaves out.
#pragma once

#include "device/block_word.cuh"
#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/config.h"
#include "kernels/fa2_sm80/forward_rows.cuh"
#include "kernels/fa2_sm80/load.cuh"
#include "mma/multiply.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

template <class Config>
class ForwardTile : WarpRows<Config> {
  using Base = WarpRows<Config>;
  using Base::kHeadDim, Base::kIsFloat, Base::kTilesM;
  using Base::params_, Base::shared_, Base::lane_idx_, Base::warp_row_, Base::output_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Storage;
  static constexpr int kBlockKV = Config::kBlockKV;
  using Tile = typename Config::KvTile;
  using KvCopier = RowCopier<Config::kNumThreads, Element, Tile>;

 public:
  __device__ __forceinline__ ForwardTile(const ForwardParams& params,
                                         const device::SequenceTile& place, int head,
                                         Storage* shared)
      : ForwardTile(params, place, head, head / static_cast<int>(params.attention.group_size),
                    place.batch * params.attention.S + place.kv_begin, shared) {}

  __device__ __forceinline__ void run() {
    this->clear();
    const int row_begin = shared_.place.row_begin;
    int kv_begin, kv_end;
    device::kv_range(shared_.see, row_begin, row_begin + Config::kBlockQ, &kv_begin, &kv_end);
    first_tile_ = kv_begin / kBlockKV;
    const int end_tile = kv_begin < kv_end ? (kv_end + kBlockKV - 1) / kBlockKV : first_tile_;
    device::common_kv_range(shared_.see, row_begin, row_begin + Config::kBlockQ, &kv_begin,
                            &kv_end);
    full_begin_ = (kv_begin + kBlockKV - 1) / kBlockKV;
    full_end_ = kv_end / kBlockKV;
    device::Tile next_kind;
    int next = next_visible(end_tile - 1, &next_kind);
    if (next >= first_tile_) {
      load_queries();
      load_kv(next, 0);
    }
    bool has_queries = false;
    for (int stage = 0; next >= first_tile_; stage ^= 1) {
      const int tile = next;
      const device::Tile kind = next_kind;
      next = next_visible(tile - 1, &next_kind);
      ptx::cp_async_wait<0>();
      // This tile's copies are visible to all, and all are done with the other stage.
      __syncthreads();
      if (next >= first_tile_) load_kv(next, stage ^ 1);
      if constexpr (Config::kKeepsQueries) {
        if (!has_queries) {
#pragma unroll
          for (int step = 0; step < kHeadDim / 16; ++step) {
            read_queries(step, lane_idx_, queries_[step]);
          }
          has_queries = true;
        }
      }
      attend(tile * kBlockKV, kind, stage);
    }
    this->store_output();
  }

 private:
  // What is the same for all threads and rarely read lives in shared memory, not in registers.
  // first_key: row of k and v where the sequence begins.
  __device__ __forceinline__ ForwardTile(const ForwardParams& params,
                                         const device::SequenceTile& place, int head, int kv_head,
                                         int64_t first_key, Storage* shared)
      : Base(params, shared),
        k_(this->rows_of(params.attention.k, first_key, params.attention.K, kv_head,
                         params.attention.H)),
        v_(this->rows_of(params.attention.v, first_key, params.attention.K, kv_head,
                         params.attention.Hv)),
        key_copier_(k_, place.kv_len),
        value_copier_(v_, place.kv_len) {
    const AttentionParams& attention = params.attention;
    if (threadIdx.x == 0) {
      shared_.place = place;
      shared_.head = head;
      if constexpr (Config::kIsGeneral) {
        shared_.see = device::make_visibility(attention, place, head);
        shared_.dropout = device::make_dropout(attention, place, head);
      } else {
        shared_.see = device::make_window(attention, place);
      }
    }
    __syncthreads();  // what thread 0 wrote is visible to all
  }

  // The last tile at or before `tile` with something to see, or one before first_tile_. Every warp
  // finds the same.
  __device__ __forceinline__ int next_visible(int tile, device::Tile* kind) {
    if constexpr (Config::kIsGeneral) {
      const int row_begin = shared_.place.row_begin;
      const auto box_of = [&](int tile) -> device::Box {
        return {row_begin, row_begin + Config::kBlockQ, tile * kBlockKV, (tile + 1) * kBlockKV};
      };
      return device::last_visible(shared_.see, box_of, tile, first_tile_, lane_idx_, &block_word_,
                                  kind);
    } else {
      if (tile < first_tile_) return tile;  // without this line ptxas spills more
      const bool is_full = tile >= full_begin_ && tile < full_end_;
      *kind = is_full ? device::Tile::kFull : device::Tile::kPartial;
      return tile;
    }
  }

  // --- Copies -----------------------------------------------------------------------------------

  // Starts copying rows begin.. to a tile. The general instance has no registers for the copier.
  template <class Copier, class SharedTile, class IsValid>
  __device__ __forceinline__ void load(const Copier& copier, const Rows<Element>& rows, int begin,
                                       int end, const IsValid& is_valid, SharedTile* tile) {
    if constexpr (!Config::kIsGeneral) {
      copier.copy(begin, static_cast<uint32_t>(rows.row_stride) * sizeof(Element), tile);
    } else if (this->is_aligned()) {
      load_rows_async<Config::kNumThreads>(rows, begin, end, is_valid, tile);
    } else {
      load_rows_elementwise<Config::kNumThreads>(rows, begin, end, is_valid, tile);
    }
  }

  __device__ __forceinline__ void load_queries() {
    const AttentionParams& attention = params_.attention;
    const device::SequenceTile& place = shared_.place;
    const int end = shared_.see.query_len;
    const Rows<Element> rows =
        this->rows_of(attention.q, place.batch * attention.T + place.query_begin, attention.N,
                      shared_.head, attention.H);
    const RowCopier<Config::kNumThreads, Element, typename Config::QTile> copier(rows, end);
    load(copier, rows, place.row_begin, end, [](int) { return true; }, &shared_.q);
  }

  // One cp.async group per tile. Keys of padding become zeros: 0 * NaN would reach the output.
  __device__ __forceinline__ void load_kv(int tile, int stage) {
    const auto is_valid = [&](int key) {
      if constexpr (Config::kIsGeneral) return device::is_key_valid(shared_.see, key);
      return true;
    };
    const int begin = tile * kBlockKV, end = shared_.see.kv_len;
    load(key_copier_, k_, begin, end, is_valid, &shared_.k[stage]);
    load(value_copier_, v_, begin, end, is_valid, &shared_.v[stage]);
    ptx::cp_async_commit();
  }

  // --- One line of the algorithm each -----------------------------------------------------------

  __device__ __forceinline__ void attend(int first_key, device::Tile kind, int stage) {
    Scores scores;
    compute_scores(shared_.k[stage], &scores);
    finish_scores(first_key, kind, &scores);
    this->update_row_max(scores);
    this->exponentiate(&scores);
    this->drop(first_key, &scores);
    accumulate_output(shared_.v[stage], scores);
  }

  __device__ __forceinline__ int opaque_lane() const { return ptx::opaque(lane_idx_) & 31; }

  // Fragment `a` of the warp's rows and features 16 step .. 16 step + 15.
  __device__ __forceinline__ void read_queries(int step, int lane_idx, mma::Fragment<Element>* a) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      shared_.q.load_a(warp_row_ + 16 * i, 16 * step, lane_idx, a[i]);
    }
  }

  // scores = Q times the keys of the tile.
  __device__ __forceinline__ void compute_scores(const Tile& k, Scores* scores) {
    scores->clear();
    const int lane_idx = opaque_lane();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      mma::Fragment<Element> read[kTilesM];
      if constexpr (!Config::kKeepsQueries) read_queries(step, lane_idx, read);
      const mma::Fragment<Element>(&a)[kTilesM] = Config::kKeepsQueries ? queries_[step] : read;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; j += 2) {
        mma::Fragment<Element> b;
        k.load_b(8 * j, 16 * step, lane_idx, b);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          mma::multiply<Element>(scores->values[i][j], a[i], b[0], b[1]);
          mma::multiply<Element>(scores->values[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // Brings the scores to final logits (general: natural units; plain: still to be scaled).
  __device__ __forceinline__ void finish_scores(int first_key, device::Tile kind, Scores* scores) {
    const bool is_partial = kind == device::Tile::kPartial;
    if constexpr (Config::kIsGeneral) {
      const float scale = params_.attention.softmax_scale;
      const float cap = params_.attention.logits_soft_cap;
      for_each(scores, [&](int, int, float x) { return x * scale; });
      if (cap > 0.0f) {
        for_each(scores, [&](int, int, float x) { return cap * tanhf(x / cap); });
      }
      if (!is_partial) return;
      for_each(scores, [&](int row, int column, float x) {
        return device::adjust_logit(shared_.see, row, first_key + column, x);
      });
    } else if (is_partial) {
      hide_outside_window(first_key, scores);
    }
  }

  // -inf for what lengths and window hide: two comparisons with constants for each score.
  __device__ __forceinline__ void hide_outside_window(int first_key, Scores* scores) const {
    const int first_column = first_key + mma::fragment_column(lane_idx_, 0);
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      const int row = this->row_of(r);
      const int low = row + shared_.see.window_low - first_column;
      const int high = min(row + shared_.see.window_high, shared_.see.kv_len - 1) - first_column;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float* score = &scores->values[r / 2][j][r % 2 * 2 + e];
          if (8 * j + e < low || 8 * j + e > high) *score = -kInfinity;
        }
      }
    }
  }

  // scores = function(row in the sequence, column in the tile, score).
  template <class Function>
  __device__ __forceinline__ void for_each(Scores* scores, const Function& function) const {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float* score = &scores->values[i][j][e];
          *score = function(this->row_of(2 * i + e / 2), 8 * j + mma::fragment_column(lane_idx_, e),
                            *score);
        }
      }
    }
  }

  // output += P times the values of the tile.
  __device__ __forceinline__ void accumulate_output(const Tile& v, const Scores& probabilities) {
    const int lane_idx = opaque_lane();
    if constexpr (kIsFloat) {
      this->accumulate_tile_sums(v, probabilities, lane_idx);
      return;
    }
#pragma unroll
    for (int step = 0; step < kBlockKV / 16; ++step) {
      mma::Fragment<Element> a[kTilesM];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) probabilities.template as_a<Element>(i, step, a[i]);
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; j += 2) {
        mma::Fragment<Element> b;
        v.load_b_transposed(16 * step, 8 * j, lane_idx, b);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          mma::multiply<Element>(output_.values[i][j], a[i], b[0], b[1]);
          mma::multiply<Element>(output_.values[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  const Rows<Element> k_, v_;  // [kv_rows, H], [kv_rows, Hv] of this head
  const KvCopier key_copier_, value_copier_;
  int first_tile_;             // of those with something to see
  int full_begin_, full_end_;  // plain: tiles that every row sees whole
  std::conditional_t<Config::kIsGeneral, device::BlockWord, typename Config::Nothing> block_word_;
  mma::Fragment<Element> queries_[Config::kKeepsQueries ? kHeadDim / 16 : 1][kTilesM];
};

// Grid: tiles * N * B CTAs along x, so that any number of heads fits; consecutive CTAs share a KV
// head. Where later rows see more keys (causal) they come first.
template <class Config>
__global__ void __launch_bounds__(Config::kNumThreads, Config::kMinBlocksPerSM)
    forward_kernel(const __grid_constant__ ForwardParams params,
                   const __grid_constant__ SequenceInputs inputs, int num_tiles) {
  extern __shared__ __align__(128) char shared_bytes[];
  const AttentionParams& attention = params.attention;
  int tile = blockIdx.x % num_tiles;
  const int entry = blockIdx.x / num_tiles;
  const int head = entry % static_cast<int>(attention.N);
  const int batch = entry / static_cast<int>(attention.N);
  if (attention.window_right >= 0) tile = num_tiles - 1 - tile;
  const device::SequenceTile place =
      device::locate_tile<true, Config::kBlockQ>(attention, inputs, batch, tile);
  if (place.row_begin >= place.query_rows) return;
  auto* shared = reinterpret_cast<typename Config::SharedStorage*>(shared_bytes);
  ForwardTile<Config>(params, place, head, shared).run();
}

}  // namespace jaxflash::fa2_sm80
