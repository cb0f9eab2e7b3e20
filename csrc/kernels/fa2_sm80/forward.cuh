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

#include "device/dropout.cuh"
#include "device/visibility.cuh"
#include "kernels/fa2_sm80/config.h"
#include "kernels/fa2_sm80/forward_rows.cuh"
#include "kernels/fa2_sm80/load.cuh"
#include "mma/fragment.cuh"
#include "ptx/math.cuh"

namespace jaxflash::fa2_sm80 {

// The same value, unknown to the compiler: else it computes the addresses of every fragment before
// the loop, runs out of registers and spills them.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <class Config>
class ForwardTile : WarpRows<Config> {
  using Base = WarpRows<Config>;
  using Base::kHeadDim, Base::kTilesM;
  using Base::params_, Base::shared_, Base::lane_idx_, Base::warp_row_, Base::output_;
  using typename Base::Element;
  using typename Base::Scores;
  using typename Base::Storage;
  static constexpr int kBlockKV = Config::kBlockKV;
  static constexpr int kPartKV = kBlockKV / Config::kScoreParts;

 public:
  // What is the same for all threads and rarely read lives in shared memory, not in registers.
  __device__ __forceinline__ ForwardTile(const ForwardParams& params,
                                         const device::SequenceTile& place, int head,
                                         Storage* shared)
      : Base(params, shared) {
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
    const int64_t kv_head = head / attention.group_size;
    const int64_t first_key = place.batch * attention.S + place.kv_begin;
    k_ = this->rows_of(attention.k, first_key, attention.K, kv_head, attention.H).data;
    v_ = this->rows_of(attention.v, first_key, attention.K, kv_head, attention.Hv).data;
  }

  __device__ __forceinline__ void run() {
    this->clear();
    const int row_begin = shared_.place.row_begin;
    int kv_begin, kv_end;
    device::kv_range(shared_.see, row_begin, row_begin + Config::kBlockQ, &kv_begin, &kv_end);
    first_tile_ = kv_begin / kBlockKV;
    const int end_tile = kv_begin < kv_end ? (kv_end + kBlockKV - 1) / kBlockKV : first_tile_;
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
  // The last tile at or before `tile` with something to see, or first_tile_ - 1. Every warp finds
  // the same.
  __device__ __forceinline__ int next_visible(int tile, device::Tile* kind) const {
    for (; tile >= first_tile_; --tile) {
      const device::Box box = {shared_.place.row_begin, shared_.place.row_begin + Config::kBlockQ,
                               tile * kBlockKV, (tile + 1) * kBlockKV};
      if constexpr (Config::kIsGeneral) {
        *kind = device::classify(shared_.see, box, lane_idx_);
        if (*kind == device::Tile::kHidden) continue;
      } else {
        *kind = device::is_inside_window<true>(shared_.see, box) ? device::Tile::kFull
                                                                 : device::Tile::kPartial;
      }
      break;
    }
    return tile;
  }

  // --- Copies -----------------------------------------------------------------------------------

  template <class Tile, class IsValid>
  __device__ __forceinline__ void load(const Rows<Element>& rows, int begin, int end,
                                       const IsValid& is_valid, Tile* tile) {
    if constexpr (Config::kIsGeneral) {
      if (!this->is_aligned()) {
        load_rows_elementwise<Config::kNumThreads>(rows, begin, end, is_valid, tile);
        return;
      }
    }
    load_rows_async<Config::kNumThreads>(rows, begin, end, is_valid, tile);
  }

  __device__ __forceinline__ void load_queries() {
    const AttentionParams& attention = params_.attention;
    const device::SequenceTile& place = shared_.place;
    const Rows<Element> rows =
        this->rows_of(attention.q, place.batch * attention.T + place.query_begin, attention.N,
                      shared_.head, attention.H);
    load(rows, place.row_begin, shared_.see.query_len, [](int) { return true; }, &shared_.q);
  }

  // One cp.async group per tile. Keys of padding become zeros: 0 * NaN would reach the output.
  __device__ __forceinline__ void load_kv(int tile, int stage) {
    const auto is_valid = [&](int key) {
      if constexpr (Config::kIsGeneral) return device::is_key_valid(shared_.see, key);
      return true;
    };
    const AttentionParams& attention = params_.attention;
    const Rows<Element> k = {k_, attention.K * attention.H, static_cast<int>(attention.H)};
    const Rows<Element> v = {v_, attention.K * attention.Hv, static_cast<int>(attention.Hv)};
    load(k, tile * kBlockKV, shared_.see.kv_len, is_valid, &shared_.k[stage]);
    load(v, tile * kBlockKV, shared_.see.kv_len, is_valid, &shared_.v[stage]);
    ptx::cp_async_commit();
  }

  // --- One line of the algorithm each -----------------------------------------------------------

  __device__ __forceinline__ void attend(int first_key, device::Tile kind, int stage) {
    const auto& k = shared_.k[stage];
    const auto& v = shared_.v[stage];
    Scores first;
    compute_scores(k, 0, &first, [](int) {});
    finish_scores(first_key, kind, &first);
    this->update_row_max(first, nullptr);
    if constexpr (Config::kScoreParts == 1) {
      this->template exponentiate_part<1>(0, &first);
      this->drop(first_key, &first);
      accumulate_output(v, 0, first, [](int) {});
    } else {
      // The exponentials of one half are spread among the products of the other, so that the warp
      // keeps the tensor cores busy meanwhile.
      Scores second;
      compute_scores(k, kPartKV, &second, [&](int step) {
        this->template exponentiate_part<kHeadDim / 16>(step, &first);
      });
      finish_scores(first_key + kPartKV, kind, &second);
      this->update_row_max(second, &first);
      this->drop(first_key, &first);
      accumulate_output(v, 0, first, [&](int step) {
        this->template exponentiate_part<kPartKV / 16 * Config::kOutputTiles / 2>(step, &second);
      });
      this->drop(first_key + kPartKV, &second);
      accumulate_output(v, kPartKV, second, [](int) {});
    }
  }

  // Fragment `a` of the warp's rows and features 16 step .. 16 step + 15.
  __device__ __forceinline__ void read_queries(int step, int lane_idx, uint32_t (*a)[4]) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      shared_.q.load_a(warp_row_ + 16 * i, 16 * step, lane_idx, a[i]);
    }
  }

  // scores = Q times the keys first.. of the tile; between(step) runs after each 16 features.
  template <class Between>
  __device__ __forceinline__ void compute_scores(const mma::SharedTile<kBlockKV, kHeadDim>& k,
                                                 int first, Scores* scores,
                                                 const Between& between) {
    scores->clear();
    const int lane_idx = opaque(lane_idx_);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t read[kTilesM][4];
      if constexpr (!Config::kKeepsQueries) read_queries(step, lane_idx, read);
      const uint32_t (&a)[kTilesM][4] = Config::kKeepsQueries ? queries_[step] : read;
#pragma unroll
      for (int j = 0; j < Config::kScoreTiles; j += 2) {
        uint32_t b[4];
        k.load_b(first + 8 * j, 16 * step, lane_idx, b);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          ptx::mma_m16n8k16<Element>(scores->values[i][j], a[i], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(scores->values[i][j + 1], a[i], b[2], b[3]);
        }
      }
      between(step);
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
      for_each(scores, [&](int row, int column, float x) {
        const int key = first_key + column;
        const bool is_hidden = (key >= shared_.see.kv_len) | (key < row + shared_.see.window_low) |
                               (key > row + shared_.see.window_high);
        return is_hidden ? -kInfinity : x;
      });
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

  // output += P times the values first.. of the tile; between(step) runs after each 16 features of
  // each 16 keys.
  template <class Between>
  __device__ __forceinline__ void accumulate_output(const mma::SharedTile<kBlockKV, kHeadDim>& v,
                                                    int first, const Scores& probabilities,
                                                    const Between& between) {
    const int lane_idx = opaque(lane_idx_);
#pragma unroll
    for (int step = 0; step < kPartKV / 16; ++step) {
      uint32_t a[kTilesM][4];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) probabilities.template as_a<Element>(i, step, a[i]);
#pragma unroll
      for (int j = 0; j < Config::kOutputTiles; j += 2) {
        uint32_t b[4];
        v.load_b_transposed(first + 16 * step, 8 * j, lane_idx, b);
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          ptx::mma_m16n8k16<Element>(output_.values[i][j], a[i], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(output_.values[i][j + 1], a[i], b[2], b[3]);
        }
        between((step * Config::kOutputTiles + j) / 2);
      }
    }
  }

  const Element *k_, *v_;  // [kv_rows, H], [kv_rows, Hv] of this head, heads apart
  int first_tile_;
  uint32_t queries_[Config::kKeepsQueries ? kHeadDim / 16 : 1][kTilesM][4];  // fragments `a`
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
